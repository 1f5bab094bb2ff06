# SPDX-License-Identifier: Apache-2.0
"""The keys that are accepted without effect: each with its default and the reason.

They are keys of verl and dots.rl, accepted so that published commands run unchanged. A key of this
table never reaches the typed configuration; ``tandem plan`` lists it with its reason if it is set.
A key that nothing reads is listed here, or is deleted from the schema.

A row whose default is ``{}`` is for all keys below it; the row of a key says its default, to which
interpolations may refer. Keys that change what is trained stand in ``schema.unbuilt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from tandem.config.schema.megatron import MEGATRON_IGNORED, MEGATRON_UNBUILT
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.unbuilt import UNBUILT_RUN, UNBUILT_SFT, Unbuilt

Table = Mapping[str, tuple[Any, str]]
"""Key -> (default, reason)."""


def _below(section: str, table: Table) -> Table:
    return {f"{section}.{key}": entry for key, entry in table.items()}


def _all(reason: str, defaults: Mapping[str, Any]) -> Table:
    return {key: (default, reason) for key, default in defaults.items()}


def _unset(reason: str, keys: str) -> Table:
    return _all(reason, dict.fromkeys(keys.split()))


def _off(table: Mapping[str, Unbuilt]) -> Table:
    return {key: (off.harmless[0], f"{off.capability} is not built") for key, off in table.items()}


def _only_with(switch: str) -> tuple[Any, str]:
    return {}, f"it is read only with {switch}, which is not built"


NOT_BUILT = "not built yet"
_PROFILER = "not built yet: profiling; trainer.trace and timings are always written"
_IN_PROCESS = "SGLang is a child process of the process that generates, and not a server"
_ALWAYS_PACKED = "batches are always packed without padding, and no result depends on it"
_FUSED = "log-probs are always computed by a fused kernel, in chunks"
_ROUTES_IN_MEMORY = "routes travel with the samples; verl never reads it either"
_MEGATRON = "weights travel in slices, by the names of the native decoder"
_OTHER_ENGINE = "only other engines of verl read it"
_COMPILED = "not built yet: nothing is compiled so far"
_DETERMINISTIC = (
    "draws are keyed by seed and sample; not built yet: only deterministic kernels on accelerators"
)
_POSITIONS = "the number of the policy decides which sequences are warned of"
_FSDP_STRATEGY = "fsdp and fsdp2 are one engine"
_PY_EXECUTABLE: Table = {
    "ray_kwargs.ray_init.runtime_env.py_executable": (
        None,
        "workers run with the Python of this command, which has tandem and its packages",
    )
}
_CHECKPOINT = (
    "a checkpoint always holds weights, optimizer, schedule and data; "
    "tandem export writes a model folder"
)
_PARTS = ("model", "optimizer", "extra")

_CHECKPOINT_KEYS: Table = {
    **_all(_CHECKPOINT, {"save_contents": _PARTS, "load_contents": _PARTS, "async_save": False}),
    "save_lora_only": (False, "a checkpoint of adapters never holds their base"),
    "strict": (True, "a checkpoint is always loaded whole, and every tensor must be there"),
    "mbridge_config": ({}, "checkpoints are written without a bridge"),
}
_MODEL: Table = {
    "use_remove_padding": (True, _ALWAYS_PACKED),
    "override_config.attn_implementation": (None, "the platform's attention is always used"),
    "override_config.use_cache": (None, "generation always has a cache, and training none"),
    "use_shm": (False, "weights are mapped from their files"),
    "torch_dtype": (None, "fsdp_config.model_dtype decides"),
    "tiled_mlp": ({}, "not built yet: it saves memory, and no result depends on it"),
    **_all(
        "trainer and generation compute base and adapters apart, with the same code",
        {"lora.merge": False, "lora.dropout_position": "pre", "lora.a2a_experimental": False},
    ),
    **_all(
        "adapters start as peft starts them, and are float32 with copies in fsdp_config.dtype",
        {"lora.lora_A_init_method": "xavier", "lora.lora_B_init_method": "zero"},
    ),
    "lora.dtype": (None, "adapters are float32, with copies in fsdp_config.dtype"),
    **_all(
        "the base is always frozen",
        {
            f"lora.freeze_{part}": True
            for part in ("language_model", "vision_model", "vision_projection")
        },
    ),
    "lora.fully_sharded_loras": (False, "adapters are sharded as the weights of their layer"),
    "mtp": _only_with("mtp.enable=True"),
    "enable_activation_offload": (False, NOT_BUILT),
    **_all(_FUSED, {"use_liger": False, "use_fused_kernels": False, "fused_kernel_options": {}}),
}
_OPTIM: Table = {
    **_below(
        "override_optimizer_config",
        _all(
            "no result depends on where Megatron's optimizer keeps its states; here "
            "optimizer_offload decides",
            {
                "optimizer_cpu_offload": False,
                "optimizer_offload_fraction": 0.0,
                "overlap_cpu_optimizer_d2h_h2d": False,
                "use_precision_aware_optimizer": False,
                "pin_cpu_grads": True,
                "pin_cpu_params": True,
            },
        ),
    ),
    **_unset(
        _OTHER_ENGINE,
        "lr_decay_steps lr_wsd_decay_steps lr_wsd_decay_style "
        "exp_avg_dtype exp_avg_sq_dtype main_grads_dtype master_weight_dtype master_weights "
        "muon_coefficient_type muon_extra_scale_factor muon_fp32_matmul_prec "
        "muon_match_adamw_update_rms muon_momentum muon_nesterov muon_num_ns_steps "
        "muon_scalar_optimizer muon_scale_mode muon_split_qkv muon_tp_mode "
        "use_checkpoint_opt_param_scheduler use_layer_wise_distributed_optimizer "
        "use_precision_aware_optimizer wd_incr_style "
        "decay_type eps name min_lr_factor init_lr_ratio lr_decay_ratio lr_min lr_start "
        "store_param_remainders",
    ),
}
_ENTROPY_KEYS = _all(
    "entropy is always computed in chunks and recomputed in the backward pass",
    {
        "entropy_from_logits_with_chunking": False,
        "entropy_from_logits_chunk_size": 2048,
        "entropy_checkpointing": False,
    },
)
_FSDP: Table = {
    **_ENTROPY_KEYS,
    **_all(
        "gradients are summed in float32, and buffers have their own precision",
        {"mixed_precision.reduce_dtype": "fp32", "mixed_precision.buffer_dtype": "fp32"},
    ),
    "use_orig_params": (False, "FSDP2 never flattens parameters into one"),
    "wrap_policy": ({}, "each layer of the model is sharded as one unit"),
    "use_torch_compile": (True, _COMPILED),
    "forward_only": (False, "the task of a model decides whether it is trained"),
    "full_determinism": (False, _DETERMINISTIC),
    "seed": (42, "trainer.seed decides; no pass of a model draws numbers"),
    "qat": _only_with("qat.enable=True"),
    "turbo_config": _only_with("strategy=turbo"),
    **_all(_ALWAYS_PACKED, {"pad_to_length": False, "pad_to_length_bucket": 1024}),
}
_FROZEN_FSDP: Table = {
    **_FSDP,
    "model_dtype": ("float32", "frozen weights are stored in the precision of the passes: dtype"),
    "optimizer_offload": (False, "a frozen model has no optimizer"),
}
_ENGINES: Table = _all(
    "it is read only by that engine, which is not built",
    {"mindspeed": {}, "torchtitan": {}, "veomni": {}},
)
_SHARED_TRAINER: Table = {
    "max_critic_ckpt_to_keep": (
        None,
        "a checkpoint holds actor and critic: max_actor_ckpt_to_keep decides",
    ),
    "default_hdfs_dir": (None, NOT_BUILT),
    "del_local_ckpt_after_load": (False, "only max_actor_ckpt_to_keep deletes old checkpoints"),
    "esi_redundant_time": (0, NOT_BUILT),
    "use_legacy_worker_impl": ("auto", "there is one implementation"),
    "use_v1": (True, "there is one pipeline"),
    **_all(
        _PROFILER,
        {
            "profile_steps": None,
            "profile_interval": (-1, -1),
            "npu_profile": {},
            "controller_nsight_options": {},
            "worker_nsight_options": {},
        },
    ),
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
            "need_tools_kwargs": False,
            "return_full_prompt": False,
        },
    ),
    **_all(
        "the model's config.json decides, and pictures are read once a prompt",
        {"return_multi_modal_inputs": True, "image_patch_size": 14},
    ),
    "trust_remote_code": (False, "actor_rollout_ref.model.trust_remote_code decides"),
    "tokenizer": (None, "the tokenizer is that of actor_rollout_ref.model.path"),
    "continuous_token": ({}, "turns are always appended to the tokens before them"),
    **_all(
        "prompts are rendered with the tools of actor_rollout_ref.rollout.multi_turn",
        {"tool_config_path": None, "function_tool_path": None},
    ),
    "use_shm": (False, "files are read once, where they are"),
}
_ACTOR: Table = {
    **_below("optim", _OPTIM),
    **_below("fsdp_config", _FSDP),
    **_ENGINES,
    **_below("checkpoint", _CHECKPOINT_KEYS),
    "use_torch_compile": (True, _COMPILED),
    "rollout_n": (1, "actor_rollout_ref.rollout.n decides"),
    "pad_to_length": (False, _ALWAYS_PACKED),
    "qat": _only_with("qat.enable=True"),
    "router_replay.record_file": (None, _ROUTES_IN_MEMORY),
    "router_replay.replay_file": (None, _ROUTES_IN_MEMORY),
    "ppo_micro_batch_size": (None, "deprecated in verl; use ppo_micro_batch_size_per_gpu"),
    **_ENTROPY_KEYS,
    "calculate_entropy": (False, "actor/entropy is always reported"),
    **_all(
        "the estimator decides whether squared probabilities are computed, in chunks",
        {"calculate_sum_pi_squared": False, "sum_pi_squared_checkpointing": False},
    ),
    "use_remove_padding": (True, _ALWAYS_PACKED),
    "use_fused_kernels": (False, _FUSED),
    "use_prefix_grouper": (False, "samples of one prompt always share it in training"),
    "use_rollout_log_probs": (False, "algorithm.rollout_correction.bypass_mode decides"),
    **_all(_PROFILER, {"profiler": {}, "profile": {}}),
}
_LENT = "devices that train do not generate beside those that generate"
_ASYNC_TRAINING: Table = {
    "use_trainer_do_validate": (False, "the devices that generate validate"),
    "use_dynamic_resource_scheduling": (False, _LENT),
    **_all(
        _LENT,
        {
            "dynamic_schedule_policy": "default",
            "dynamic_schedule_deactivate_ratio": 0.3,
            "dynamic_schedule_enable_rebalance": True,
        },
    ),
    "concurrent_samples_per_replica": (16, "actor_rollout_ref.rollout.max_num_seqs decides"),
    **_all(
        "rewards are always computed beside generation",
        {"enable_reward_queue": False, "reward_queue_size": None},
    ),
}
_V1: Table = {
    "sync": ({}, "a synchronous run has no settings of its own"),
    "separate_async.parameter_sync_step": (
        4,
        "weights go to the rollout once a batch, after all mini-batches",
    ),
    "separate_async.hybrid_rollout": ({}, _LENT),
    **_below(
        "sampler",
        {
            "max_off_policy_strategy": ("drop", "no sample is ever later than the threshold"),
            "sync_refill_failed_groups": (False, "prompts whose samples failed are counted"),
            "custom_sampler.name": (None, "custom_sampler.path is not built"),
            "sampler_kwargs": ({}, "custom_sampler.path is not built"),
        },
    ),
}
_ROLLOUT: Table = {
    "mode": ("async", "one pipeline serves both; the lag is trainer.generate_ahead_steps"),
    "calculate_log_probs": (False, "log-probs of sampled tokens are always returned"),
    "max_model_len": (None, "it is data.max_prompt_length + data.max_response_length"),
    "prompt_length": (None, "it is data.max_prompt_length"),
    "response_length": (None, "it is data.max_response_length"),
    "layered_summon": (False, "weights are transferred in buckets of a fixed size"),
    **_all(
        "engines are split by tensor_model_parallel_size alone, and the devices that generate say "
        "how many there are",
        {
            "data_parallel_size": 1,
            "pipeline_model_parallel_size": 1,
        },
    ),
    "log_prob_micro_batch_size": (
        None,
        "deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    ),
    "skip_tokenizer_init": (True, "engines get and return token ids"),
    "engine_kwargs": ({}, "it tunes an engine that is not built yet"),
    **_below(
        "engine_kwargs.vllm",
        {
            "disable_mm_preprocessor_cache": (False, "vLLM has it no longer"),
            "swap_space": (4, "vLLM has it no longer"),
            **_all(
                "only vLLM's server reads it",
                {"tool_call_parser": None, "enable_auto_tool_choice": False},
            ),
        },
    ),
    **_all(
        "no version of verl that is in use reads it",
        {
            "multi_turn.num_repeat_rollouts": None,
            "multi_turn.completion_callback": None,
            "multi_turn.max_turns": None,
            "multi_turn.enable_tokenization_sanity_check": None,
            "agent.custom_async_server": {},
            "agent.custom_async_server.path": None,
            "agent.custom_async_server.name": None,
        },
    ),
    "trace": ({}, NOT_BUILT),
    "profiler": ({}, _PROFILER),
    "prometheus": ({}, "not built yet: metrics of the engine are metrics of the run"),
    **_below(
        "checkpoint_engine",
        _all(
            "the placement of the tasks decides how weights travel",
            {"backend": "naive", "custom_backend_module": None, "engine_kwargs": {}},
        ),
    ),
    "disaggregation": ({}, "not built yet: each device reads prompts and generates"),
    "layer_name_map": ({}, _MEGATRON),
    "moe_load_balance_metrics_interval": (0, "not built yet: models with experts"),
    "mtp": _only_with("actor_rollout_ref.model.mtp.enable=True"),
    "multi_stage_wake_up": (False, "the native engine shares its weights with the trainer"),
    "over_sample_rate": (
        0,
        "no sample is dropped for being slow; an asynchronous run passes it over until it is there",
    ),
    "qat": _only_with("qat.enable=True"),
    "quantization_config_file": (None, "rollout.quantization=fp8 needs no further settings"),
    "scheduling_policy": ("fcfs", "no result depends on the order of the sequences"),
    "server": ({}, _IN_PROCESS),
    "sglang_rollout_mode": (None, _IN_PROCESS),
    "skip_dump_dir": ("/tmp/rollout_dump", "only skip_rollout reads it, which is not built"),
    "skip": _only_with("actor_rollout_ref.rollout.skip.enable=True"),
}
_REF: Table = {
    **_below("fsdp_config", _FROZEN_FSDP),
    **_ENGINES,
    **_all(
        "the reference is the actor before training; actor_rollout_ref.actor decides",
        {
            "strategy": "fsdp",
            "use_torch_compile": True,
            "load_weight": True,
            "pad_to_length": False,
            "rollout_n": 1,
        },
    ),
    **_all("the entropy of the reference is not computed", dict.fromkeys(_ENTROPY_KEYS, False)),
    "optim": ({}, "the reference is not trained"),
    "router_replay": _only_with("router_replay.mode"),
    "log_prob_micro_batch_size": (
        None,
        "deprecated in verl; use log_prob_micro_batch_size_per_gpu",
    ),
    **_all(_PROFILER, {"profiler": {}, "profile": {}}),
}
_CRITIC: Table = {
    **_below("model", _MODEL),
    **_below("model.fsdp_config", _FSDP),
    "model.custom_chat_template": (None, "prompts are rendered once, for actor and critic"),
    "model.override_config.max_position_embeddings": (None, _POSITIONS),
    **_below("optim", _OPTIM),
    **_ENGINES,
    **_below("checkpoint", _CHECKPOINT_KEYS),
    "strategy": ("fsdp", "one engine trains both models; actor_rollout_ref.actor.strategy decides"),
    "rollout_n": (1, "actor_rollout_ref.rollout.n decides"),
    "load_weight": (True, "actor_rollout_ref.actor.load_weight decides for both models"),
    "ppo_micro_batch_size": (None, "deprecated in verl; use ppo_micro_batch_size_per_gpu"),
    "forward_micro_batch_size": (None, "deprecated in verl; use forward_micro_batch_size_per_gpu"),
    "nccl_timeout": (600, "actor_rollout_ref.nccl_timeout decides"),
    "profiler": ({}, _PROFILER),
}
_REWARD_MODEL: Table = {
    **_below("model", _MODEL),
    "model.override_config.max_position_embeddings": (None, _POSITIONS),
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
            {"max_concurrent": 64, "memory_limit_mb": 1024},
        ),
    ),
    "rollout": ({}, "a reward model is not behind a server: it scores a batch in one pass"),
    "load_weight": (True, "a reward model's weights are always loaded"),
    "nccl_timeout": (600, "actor_rollout_ref.nccl_timeout decides"),
    "profiler": ({}, _PROFILER),
}

RUN_IGNORED: Table = {
    **_below("data", _DATA),
    **_below("actor_rollout_ref.model", _MODEL),
    **_below("actor_rollout_ref.actor", _ACTOR),
    **_below("actor_rollout_ref.rollout", _ROLLOUT),
    **_below("actor_rollout_ref.ref", _REF),
    "actor_rollout_ref.profiler": ({}, _PROFILER),
    "algorithm.filter_groups.max_inflight_gen_batches": (
        1,
        "prompts are admitted one by one, as slots become free",
    ),
    "algorithm.pf_ppo": ({}, NOT_BUILT),
    **_below(
        "algorithm",
        _all(
            "only algorithm.rollout_is of verl 0.6.0 reads it, which is not built",
            {
                "rollout_is_threshold": None,
                "rollout_is_threshold_lower": None,
                "rollout_is_level": "token",
                "rollout_is_mode": "truncate",
                "rollout_is_veto_threshold": 1e-4,
            },
        ),
    ),
    **_below("critic", _CRITIC),
    **_below("reward_model", _REWARD_MODEL),
    **_below("trainer", _SHARED_TRAINER),
    "ray_kwargs.timeline_json_file": (None, NOT_BUILT),
    **_PY_EXECUTABLE,
    "global_profiler": ({}, _PROFILER),
    "distillation": _only_with("distillation.enabled=True"),
    "skip": _only_with("skip.rollout.enable=True"),
    **_below("trainer.v1", _V1),
    **_below("async_training", _ASYNC_TRAINING),
    "transfer_queue": ({}, "micro-batches go straight to the ranks that compute them"),
    **MEGATRON_IGNORED,
    **_off({**UNBUILT_RUN, **MEGATRON_UNBUILT}),
}
SFT_IGNORED: Table = {
    "data.num_workers": (8, "examples are rendered once, before the first step"),
    "data.micro_batch_size": (None, "deprecated in verl; use micro_batch_size_per_gpu"),
    "data.pad_mode": ("no_padding", _ALWAYS_PACKED),
    "data.ignore_input_ids_mismatch": (False, NOT_BUILT),
    "data.use_shm": (False, "files are read once, where they are"),
    **_below("model", _MODEL),
    **_below(
        "engine",
        {
            **_FSDP,
            **_all(
                _OTHER_ENGINE,
                {
                    "backend_config": {},
                    "moe_config": {},
                    "override_ddp_config": {},
                    "override_mcore_model_config": {},
                    "override_transformer_config": {},
                    "router_replay": {},
                },
            ),
            **_unset(
                _OTHER_ENGINE,
                "activation_checkpoint activation_checkpointing activation_gpu_limit "
                "attn_implementation attn_type basic_modules causal_conv1d_implementation "
                "chunk_gated_delta_rule_implementation ckpt_manager context_parallel_size cp_size "
                "cross_entropy_loss_implementation data_parallel_replicate_size "
                "data_parallel_shard_size data_parallel_size defer_fsdp_grad_sync "
                "dist_checkpointing_path dist_checkpointing_prefix "
                "dist_ckpt_optim_fully_reshardable distrib_optim_fully_reshardable_mem_efficient "
                "distributed_strategy dp_replicate_size dsa_attention_implementation "
                "dsa_indexer_implementation dynamic_context_parallel enable_compile enable_fp8 "
                "enable_fsdp_offload enable_full_shard enable_reentrant ep_size "
                "expert_parallel_size expert_tensor_parallel_size "
                "force_use_huggingface grad_offload init_device load_balancing_loss_implementation "
                "load_checkpoint_path max_seq_len max_seqlen_per_dp_cp_rank mhc_implementation "
                "moe_implementation mp_output_dtype mp_param_dtype mp_reduce_dtype "
                "pad_bshd_to_minibatch_max pipeline_parallel_size "
                "pp_size rms_norm_gated_implementation rms_norm_implementation "
                "rotary_pos_emb_implementation sequence_parallel spmd_backend "
                "swiglu_mlp_implementation tensor_parallel_size tp_size ulysses_parallel_size "
                "use_dist_checkpointing use_distributed_optimizer use_mbridge use_megatron_fsdp "
                "use_remove_padding vanilla_mbridge virtual_pipeline_model_parallel_size",
            ),
        },
    ),
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
                "v1.trainer_mode": "sync",
                "v1.colocate_async.num_warmup_batches": 1,
                "v1.separate_async.num_warmup_batches": 1,
                "v1.sampler.max_off_policy_threshold": 8,
            },
        ),
    ),
    "ray_kwargs.timeline_json_file": (None, NOT_BUILT),
    **_PY_EXECUTABLE,
    **_below("checkpoint", _CHECKPOINT_KEYS),
    **_all(_PROFILER, {"profiler": {}, "global_profiler": {}}),
    "use_remove_padding": (True, _ALWAYS_PACKED),
    **_off(UNBUILT_SFT),
}


def ignored_table(schema: type[BaseModel]) -> Table:
    """Return the ignored keys of a schema."""
    tables: Mapping[type[BaseModel], Table] = {RunConfig: RUN_IGNORED, SftConfig: SFT_IGNORED}
    return tables[schema]


def unbuilt_table(schema: type[BaseModel]) -> Mapping[str, Unbuilt]:
    """Return the keys of a schema that choose a capability that is not built."""
    tables: Mapping[type[BaseModel], Mapping[str, Unbuilt]] = {
        RunConfig: {**UNBUILT_RUN, **MEGATRON_UNBUILT},
        SftConfig: UNBUILT_SFT,
    }
    return tables[schema]
