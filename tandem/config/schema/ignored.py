# SPDX-License-Identifier: Apache-2.0
"""The keys that are accepted without effect: each with its default and the reason.

They are keys of verl and dots.rl, accepted so that published commands run unchanged. A key of this
table never reaches the typed configuration; ``tandem plan`` lists it with its reason if it is set.
A key that nothing reads is listed here, or is deleted from the schema.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

Table = Mapping[str, tuple[Any, str]]
"""Key -> (default, reason)."""


def _below(section: str, table: Table) -> Table:
    return {f"{section}.{key}": entry for key, entry in table.items()}


def _all(reason: str, defaults: Mapping[str, Any]) -> Table:
    return {key: (default, reason) for key, default in defaults.items()}


NOT_BUILT = "not built yet"
_ALWAYS_PACKED = "batches are always packed without padding, and no result depends on it"
_FUSED = "log-probs are always computed by a fused kernel, in chunks"
_MEGATRON = "not built yet: strategy=megatron"
_FSDP_STRATEGY = "fsdp and fsdp2 are one engine"
_CHECKPOINT = (
    "a checkpoint always holds weights, optimizer, schedule and data; "
    "tandem export writes a model folder"
)
_PARTS = ("model", "optimizer", "extra")

_CHECKPOINT_KEYS = _all(
    _CHECKPOINT, {"save_contents": _PARTS, "load_contents": _PARTS, "async_save": False}
)
_CUSTOM_CLASS = _all(
    NOT_BUILT, {"path": None, "name": None, "class_path": None, "class_name": None}
)
_MODEL: Table = {
    "use_remove_padding": (True, _ALWAYS_PACKED),
    "tokenizer_path": (None, "not built yet: the tokenizer is that of model.path"),
    "hf_config_path": (None, "not built yet: config.json is that of model.path"),
    "override_config": ({}, NOT_BUILT),
    "external_lib": (None, NOT_BUILT),
    "use_shm": (False, "weights are mapped from their files"),
    "enable_activation_offload": (False, NOT_BUILT),
    **_all(_FUSED, {"use_liger": False, "use_fused_kernels": False, "fused_kernel_options": {}}),
    **_all(
        "not built yet: LoRA; all weights are trained",
        {
            "lora_alpha": 16,
            "lora_adapter_path": None,
            "target_modules": ("all-linear",),
            "exclude_modules": (),
        },
    ),
}
_OPTIM: Table = {
    "optimizer_impl": ("torch.optim", NOT_BUILT),
    "override_optimizer_config": ({}, NOT_BUILT),
    **_all(
        "a setting of Megatron's optimizer, which is not built yet",
        {
            "lr_warmup_init": 0.0,
            "lr_decay_steps": None,
            "lr_decay_style": "constant",
            "min_lr": 0.0,
        },
    ),
}
_FSDP: Table = {
    "use_orig_params": (False, "FSDP2 never flattens parameters into one"),
    "wrap_policy": ({}, "each layer of the model is sharded as one unit"),
}
_FROZEN_FSDP: Table = {
    **_FSDP,
    "model_dtype": ("float32", "frozen weights are stored in the precision of the passes: dtype"),
    "optimizer_offload": (False, "a frozen model has no optimizer"),
}
_MEGATRON_KEYS = _all(
    _MEGATRON,
    {
        "param_offload": False,
        "grad_offload": False,
        "optimizer_offload": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "expert_tensor_parallel_size": None,
        "context_parallel_size": 1,
        "sequence_parallel": True,
        "use_distributed_optimizer": True,
        "use_dist_checkpointing": False,
        "dist_checkpointing_path": None,
        "use_mbridge": True,
        "vanilla_mbridge": True,
        "load_weight": True,
        "seed": 42,
        "dtype": "auto",
        "override_ddp_config": {},
        "override_transformer_config": {},
        "override_mcore_model_config": {},
    },
)
_EXPERTS: Table = {"expert_model_parallel_size": (1, _MEGATRON)}
_MULTI_TURN = "not built yet: multi-turn rollouts"
_MULTI_TURN_KEYS = _all(
    _MULTI_TURN,
    {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
        "tool_config_path": None,
        "interaction_config_path": None,
        "use_inference_chat_template": False,
        "tokenization_sanity_check_mode": "strict",
        "format": "hermes",
    },
)
_SHARED_TRAINER: Table = {
    "max_critic_ckpt_to_keep": (
        None,
        "a checkpoint holds actor and critic: max_actor_ckpt_to_keep decides",
    ),
    "default_hdfs_dir": (None, NOT_BUILT),
    "del_local_ckpt_after_load": (
        False,
        "only max_actor_ckpt_to_keep deletes old checkpoints",
    ),
    "esi_redundant_time": (0, NOT_BUILT),
    "use_legacy_worker_impl": ("auto", "there is one implementation"),
    "use_v1": (True, "there is one pipeline"),
}

_DATA: Table = {
    "val_batch_size": (None, "the whole validation set is generated at once"),
    "filter_overlong_prompts_workers": (
        1,
        "the tokenizer filters in one batch with its own threads",
    ),
    "validation_shuffle": (False, "validation metrics do not depend on the order of the rows"),
    **_all(
        "there is no data loader process: prompts are rendered once, before the first step",
        {
            "dataloader_num_workers": 8,
            "return_raw_input_ids": False,
            "return_raw_chat": True,
            "return_full_prompt": False,
        },
    ),
    **_all(
        "not built yet: prompts are text only",
        {"return_multi_modal_inputs": True, "image_key": "images", "video_key": "videos"},
    ),
    "trust_remote_code": (False, "actor_rollout_ref.model.trust_remote_code decides"),
    "tokenizer": (None, "the tokenizer is that of actor_rollout_ref.model.path"),
    "tool_config_path": (None, "not built yet: multi-turn rollouts with tools"),
    "use_shm": (False, "files are read once, where they are"),
    **_below("sampler", _CUSTOM_CLASS),
    **_below("datagen", _CUSTOM_CLASS),
}
_ACTOR: Table = {
    **_below("optim", _OPTIM),
    **_below("fsdp_config", _FSDP),
    **_below("megatron", _MEGATRON_KEYS),
    **_below("checkpoint", _CHECKPOINT_KEYS),
    "use_torch_compile": (True, "not built yet: nothing is compiled so far"),
    "ppo_micro_batch_size": (None, "deprecated in verl; use ppo_micro_batch_size_per_gpu"),
    **_all(
        "entropy is always computed in chunks and recomputed in the backward pass",
        {"entropy_from_logits_with_chunking": False, "entropy_checkpointing": False},
    ),
    "calculate_entropy": (False, "actor/entropy is always reported"),
    "use_remove_padding": (True, _ALWAYS_PACKED),
    "use_fused_kernels": (False, _FUSED),
    "use_prefix_grouper": (False, "samples of one prompt always share it in training"),
    "freeze_vision_tower": (False, "models are text only"),
    "profiler": ({}, NOT_BUILT),
}
_ROLLOUT: Table = {
    "dtype": (
        "auto",
        "the rollout uses the trainer's weights; actor.fsdp_config.dtype decides",
    ),
    "mode": ("async", "one pipeline serves both; the lag is trainer.generate_ahead_steps"),
    "calculate_log_probs": (False, "log-probs of sampled tokens are always returned"),
    "max_model_len": (None, "it is data.max_prompt_length + data.max_response_length"),
    "prompt_length": (None, "it is data.max_prompt_length"),
    "response_length": (None, "it is data.max_response_length"),
    "enable_chunked_prefill": (True, "the native engine prefills whole prompts"),
    "enable_prefix_caching": (True, "samples of one prompt always share it"),
    "load_format": ("dummy", "the rollout takes the trainer's weights before it generates"),
    "layered_summon": (False, "weights are transferred in buckets of a fixed size"),
    **_all(
        "each device of the pool that generates is a replica of the native engine",
        {
            "tensor_model_parallel_size": 1,
            "data_parallel_size": 1,
            "expert_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        },
    ),
    "log_prob_micro_batch_size": (
        None,
        "deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    ),
    **_all(
        "it tunes an engine that is not built yet; the native engine does not need it",
        {"disable_log_stats": True, "skip_tokenizer_init": True, "engine_kwargs": {}},
    ),
    **_below("multi_turn", _MULTI_TURN_KEYS),
    "agent": ({}, _MULTI_TURN),
    "trace": ({}, NOT_BUILT),
    **_all(
        "not built yet: rollouts are always generated",
        {"skip_rollout": False, "skip_dump_dir": "/tmp/rollout_dump"},
    ),
}
_REF: Table = {
    **_below("fsdp_config", _FROZEN_FSDP),
    **_below("megatron", {**_MEGATRON_KEYS, **_EXPERTS}),
    **_all(
        "the reference is the actor before training; actor_rollout_ref.actor decides",
        {"strategy": "fsdp", "use_torch_compile": True, "load_weight": True},
    ),
    "log_prob_micro_batch_size": (
        None,
        "deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    ),
    "profiler": ({}, NOT_BUILT),
}
_CRITIC: Table = {
    **_below("model", _MODEL),
    **_below("model.fsdp_config", _FSDP),
    "model.custom_chat_template": (None, "prompts are rendered once, for actor and critic"),
    "model.rope_scaling": ({}, NOT_BUILT),
    "model.tiled_mlp": ({}, NOT_BUILT),
    **_below("optim", _OPTIM),
    **_below("megatron", {**_MEGATRON_KEYS, **_EXPERTS}),
    **_below("checkpoint", _CHECKPOINT_KEYS),
    "strategy": ("fsdp", "one engine trains both models; actor_rollout_ref.actor.strategy decides"),
    "rollout_n": (1, "actor_rollout_ref.rollout.n decides"),
    "load_weight": (True, "actor_rollout_ref.actor.load_weight decides for both models"),
    "ppo_micro_batch_size": (None, "deprecated in verl; use ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size": (None, "deprecated in verl; use forward_micro_batch_size_per_gpu"),
    "nccl_timeout": (600, "actor_rollout_ref.nccl_timeout decides"),
    "profiler": ({}, NOT_BUILT),
}
_REWARD_MODEL: Table = {
    **_below("model", _MODEL),
    **_below(
        "model",
        _all(
            "a reward model is not trained",
            {"enable_gradient_checkpointing": True, "recompute_granularity": "full"},
        ),
    ),
    **_below("model.fsdp_config", _FROZEN_FSDP),
    "strategy": ("fsdp", _FSDP_STRATEGY),
    "max_length": (None, "nothing is cut off: prompt and response are read whole"),
    **_all(
        "the reward model is on the devices of actor-train",
        {"enable_resource_pool": False, "n_gpus_per_node": 0, "nnodes": 0},
    ),
    "micro_batch_size": (None, "deprecated in verl; use micro_batch_size_per_gpu"),
    "use_reward_loop": (True, "a batch is scored in one pass, before its advantages"),
    "launch_reward_fn_async": (
        False,
        "rewards are always computed as soon as a group is generated",
    ),
    **_below(
        "sandbox_fusion",
        _all(
            "not built yet: reward code runs in local processes",
            {"url": None, "max_concurrent": 64, "memory_limit_mb": 1024},
        ),
    ),
    "profiler": ({}, NOT_BUILT),
}

RUN_IGNORED: Table = {
    **_below("data", _DATA),
    **_below("actor_rollout_ref.model", _MODEL),
    **_below("actor_rollout_ref.actor", _ACTOR),
    **_below("actor_rollout_ref.rollout", _ROLLOUT),
    **_below("actor_rollout_ref.ref", _REF),
    "algorithm.use_pf_ppo": (False, NOT_BUILT),
    "algorithm.pf_ppo": ({}, NOT_BUILT),
    **_below("critic", _CRITIC),
    **_below("reward_model", _REWARD_MODEL),
    **_below("trainer", _SHARED_TRAINER),
    "ray_kwargs.timeline_json_file": (None, NOT_BUILT),
    "global_profiler": ({}, NOT_BUILT),
    "transfer_queue": ({}, "micro-batches go straight to the ranks that compute them"),
}
SFT_IGNORED: Table = {
    "data.multiturn.tools_key": ("tools", NOT_BUILT),
    "data.multiturn.enable_thinking_key": ("enable_thinking", NOT_BUILT),
    "data.micro_batch_size": (None, "deprecated in verl; use micro_batch_size_per_gpu"),
    "data.pad_mode": ("no_padding", _ALWAYS_PACKED),
    "data.ignore_input_ids_mismatch": (False, NOT_BUILT),
    "data.use_shm": (False, "files are read once, where they are"),
    **_below("model", _MODEL),
    **_below("engine", _FSDP),
    **_below("optim", _OPTIM),
    **_below("trainer", _SHARED_TRAINER),
    **_below(
        "trainer",
        _all(
            "only tandem train reads it",
            {
                "val_only": False,
                "critic_warmup": 0,
                "metrics": (),
                "log_val_generations": 0,
                "rollout_data_dir": None,
                "validation_data_dir": None,
                "async_pipeline": False,
                "generate_ahead_steps": 0,
                "deterministic_async": False,
                "separated_node_tasks": (),
                "separated_node_ratios": (),
            },
        ),
    ),
    "ray_kwargs.timeline_json_file": (None, NOT_BUILT),
    **_below("checkpoint", _CHECKPOINT_KEYS),
    "use_remove_padding": (True, _ALWAYS_PACKED),
}


def ignored_table(schema: type[BaseModel]) -> Table:
    """Return the ignored keys of a schema."""
    tables: Mapping[type[BaseModel], Table] = {RunConfig: RUN_IGNORED, SftConfig: SFT_IGNORED}
    return tables[schema]
