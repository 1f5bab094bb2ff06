# SPDX-License-Identifier: Apache-2.0
"""verl's ``megatron.*`` keys, which ``strategy=megatron`` honours by tandem's own engine.

A key that lays out weights is a spelling of the key of ``fsdp_config`` with the same effect. Every
other key stands in a table with the reason why it has no effect here, or is refused by the name of
what it asks for. ``override_transformer_config`` takes the keys of its table only: any other
setting of Megatron's layers could change what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.schema.unbuilt import Unbuilt

STRATEGY = "actor_rollout_ref.actor.strategy"
OVERRIDES = "override_transformer_config"

_LAYOUTS = {
    "actor_rollout_ref.actor.megatron": "actor_rollout_ref.actor.fsdp_config",
    "actor_rollout_ref.ref.megatron": "actor_rollout_ref.ref.fsdp_config",
    "critic.megatron": "critic.model.fsdp_config",
    "reward_model.megatron": "reward_model.model.fsdp_config",
}
"""Section of Megatron -> section of FSDP."""
STAGE_KEYS = (
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)
_FREEZE = "override_mcore_model_config.moe_config.freeze_moe_router"
_SAME = {
    "param_offload": "param_offload",
    "optimizer_offload": "optimizer_offload",
    "tensor_model_parallel_size": "tensor_model_parallel_size",
    "expert_model_parallel_size": "expert_model_parallel_size",
    "expert_tensor_parallel_size": "expert_tensor_parallel_size",
    "context_parallel_size": "ulysses_sequence_parallel_size",
    "pipeline_model_parallel_size": "pipeline_model_parallel_size",
    "dtype": "dtype",
    "backend": "backend",
    **{f"{OVERRIDES}.{name}": name for name in STAGE_KEYS},
}
"""Key of Megatron -> key of FSDP with the same effect."""

SPELLINGS: Mapping[str, str] = {
    **{
        f"{theirs}.{name}": f"{ours}.{key}"
        for theirs, ours in _LAYOUTS.items()
        for name, key in _SAME.items()
    },
    "actor_rollout_ref.actor.megatron.load_weight": "actor_rollout_ref.actor.load_weight",
    f"actor_rollout_ref.actor.megatron.{_FREEZE}": "actor_rollout_ref.actor.freeze_moe_router",
    **{
        f"{section}.lr_decay_style": f"{section}.lr_scheduler_type"
        for section in ("actor_rollout_ref.actor.optim", "critic.optim")
    },
}
"""Spelling -> key, if ``strategy=megatron``."""

_UNREAD = f"it is read only with {STRATEGY}=megatron"
_HOW = "it decides how Megatron computes, and no result depends on it"
_FUSED = "tandem's kernels are fused where the device has them, and no result depends on it"
_SHARDED = "weights, gradients and optimizer state are always sharded over all ranks"
_RECOMPUTED = (
    "actor_rollout_ref.model.enable_gradient_checkpointing and recompute_granularity decide what "
    "is recomputed, in every layer"
)
_PACKED = "batches are always packed without padding"
_CHECKPOINT = "a checkpoint of tandem continues on any number of devices"
_NO_BRIDGE = "slices of weights are read from, and written to, Hugging Face folders directly"
_STAGES = "it decides when stages compute and what they keep, and no result depends on it"

Table = Mapping[str, tuple[Any, str]]
"""Key -> (default, reason)."""


def _all(reason: str, names: str) -> dict[str, tuple[Any, str]]:
    return {name: (None, reason) for name in names.split()}


_OVERRIDES: Table = {
    **_all(
        _RECOMPUTED,
        "recompute_granularity recompute_method recompute_num_layers recompute_modules",
    ),
    **_all(
        _HOW,
        "moe_permute_fusion moe_grouped_gemm moe_token_dispatcher_type moe_enable_deepep "
        "moe_shared_expert_overlap moe_flex_dispatcher_backend",
    ),
    **_all(
        _FUSED,
        "apply_rope_fusion gradient_accumulation_fusion bias_activation_fusion "
        "bias_dropout_fusion masked_softmax_fusion persist_layer_norm use_flash_attn "
        "use_fused_rmsnorm use_fused_swiglu use_fused_rotary_pos_emb "
        "use_rotary_position_embeddings attention_backend",
    ),
    **_all(_STAGES, "deallocate_pipeline_outputs"),
    "moe_router_enable_expert_bias": (None, "the family of the model decides"),
    **_all(
        "the key of the same name above it decides",
        "context_parallel_size sequence_parallel tensor_model_parallel_size",
    ),
}
"""Keys of ``override_transformer_config`` without effect."""

_AUXILIARY = Unbuilt("an auxiliary loss of routers", (0, None))
_UNEVEN = Unbuilt(
    "a split into stages that is not by numbers of layers",
    (None, False),
    "Set num_layers_in_first_pipeline_stage and num_layers_in_last_pipeline_stage.",
)
_REFUSED_OVERRIDES: Mapping[str, Unbuilt] = {
    "moe_router_dtype": Unbuilt("a router in another precision than fp32", ("fp32", None)),
    "moe_aux_loss_coeff": _AUXILIARY,
    "moe_z_loss_coeff": _AUXILIARY,
    "moe_router_load_balancing_type": Unbuilt(
        "balancing of experts by a loss or a bias", ("none", None)
    ),
    "moe_router_bias_update_rate": Unbuilt("training of a router's correction", (0, None)),
    "account_for_embedding_in_pipeline_split": _UNEVEN,
    "account_for_loss_in_pipeline_split": _UNEVEN,
    "pipeline_model_parallel_layout": _UNEVEN,
    "fp8": Unbuilt("training in fp8", (None, False)),
    "attention_dropout": Unbuilt("dropout", (0, None)),
    "hidden_dropout": Unbuilt("dropout", (0, None)),
    "mtp_num_layers": Unbuilt("multi-token prediction", (0, None)),
}

_KEYS: Table = {
    **{name: (default, _UNREAD) for name, default in {
        "param_offload": False,
        "optimizer_offload": False,
        "tensor_model_parallel_size": 1,
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None,
        "context_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "dtype": "auto",
        "backend": "native",
        "load_weight": True,
        **{f"{OVERRIDES}.{name}": None for name in STAGE_KEYS},
    }.items()},
    "grad_offload": (False, "gradients are freed after each step; verl never reads it either"),
    "virtual_pipeline_model_parallel_size": (None, _STAGES),
    "dynamic_context_parallel": (False, "sequences are dealt to ranks by their cost"),
    "max_seqlen_per_dp_cp_rank": (None, "sequences are dealt to ranks by their cost"),
    "sequence_parallel": (
        True,
        "not built yet: each tensor-parallel rank holds the activations between layers whole",
    ),
    "use_distributed_optimizer": (True, _SHARDED),
    "use_megatron_fsdp": (False, _SHARDED),
    "dist_checkpointing_path": (None, "only use_dist_checkpointing=True reads it"),
    "dist_checkpointing_prefix": ("", "only use_dist_checkpointing=True reads it"),
    "dist_ckpt_optim_fully_reshardable": (False, _CHECKPOINT),
    "distrib_optim_fully_reshardable_mem_efficient": (False, _CHECKPOINT),
    "seed": (42, "trainer.seed draws random weights"),
    "override_ddp_config": ({}, "it tunes Megatron's data parallelism, which is not used"),
    "override_mcore_model_config": ({}, "verl reads none of it but freeze_moe_router"),
    "use_mbridge": (True, _NO_BRIDGE),
    "vanilla_mbridge": (False, _NO_BRIDGE),
    "use_remove_padding": (True, _PACKED),
    "pad_bshd_to_minibatch_max": (True, _PACKED),
    "pad_to_length": (False, _PACKED),
    "pad_to_length_bucket": (512, _PACKED),
    "entropy_from_logits_with_chunking": (False, "entropy is always computed in chunks"),
    "entropy_from_logits_chunk_size": (2048, "entropy is always computed in chunks"),
    "forward_only": (False, "the task of a model decides whether it is trained"),
    "qat": ({}, "it is read only with qat.enable=True, which is not built"),
    **{f"{OVERRIDES}.{name}": row for name, row in _OVERRIDES.items()},
}  # fmt: skip

_REFUSED: Mapping[str, Unbuilt] = {
    "use_dist_checkpointing": Unbuilt(
        "a start from a checkpoint of Megatron",
        (False, None),
        "Name a Hugging Face folder in actor_rollout_ref.model.path.",
    ),
    "qat.enable": Unbuilt("quantization-aware training"),
    **{f"{OVERRIDES}.{name}": row for name, row in _REFUSED_OVERRIDES.items()},
}

_FROZEN = Unbuilt("a frozen router of another model than the policy", (False, None))
_OF_ACTOR: Table = {_FREEZE: (False, _UNREAD)}
"""The key that is read in the section of the actor only."""
_OF_POLICY: Table = {
    **_all(
        "only the policy's choices are replayed",
        "router_replay.mode router_replay.record_file router_replay.replay_file",
    ),
    "load_weight": (True, "actor_rollout_ref.actor.load_weight decides for both models"),
}
"""Keys that have an effect in the section of the actor only."""
_LOADED = {
    "reward_model.megatron.load_weight": (True, "a reward model's weights are always loaded")
}

MEGATRON_IGNORED: Table = {
    f"{section}.{name}": row
    for section in _LAYOUTS
    for name, row in {**_KEYS, **(_OF_ACTOR if ".actor." in section else _OF_POLICY)}.items()
} | _LOADED
"""The keys without effect, of all models; those of ``SPELLINGS`` have one if their strategy is
chosen."""
MEGATRON_UNBUILT: Mapping[str, Unbuilt] = {
    f"{section}.{name}": row
    for section in _LAYOUTS
    for name, row in {**_REFUSED, **({} if ".actor." in section else {_FREEZE: _FROZEN})}.items()
}


def in_words_of_megatron(text: str) -> str:
    """Replace the names of keys in a message by their spellings in Megatron's sections."""
    for spelling, key in SPELLINGS.items():
        text = text.replace(key, spelling)
    return text


def is_closed(name: str) -> bool:
    """Return whether a key stands in a section that takes the keys of its table only."""
    return any(name.startswith(f"{section}.{OVERRIDES}.") for section in _LAYOUTS)
