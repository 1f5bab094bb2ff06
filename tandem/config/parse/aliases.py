# SPDX-License-Identifier: Apache-2.0
"""Other spellings of keys: keys that verl renamed or moved, and misspellings of dots.rl.

Each meaning has one key in the schema. Every other spelling is replaced by that key here.
"""

from __future__ import annotations

from pydantic import BaseModel

from tandem.config.parse.keys import find_key, is_section

ALIASES: dict[str, str] = {
    "actor_rollout_ref.actor.grad_clip": "actor_rollout_ref.actor.optim.clip_grad",
    "actor_rollout_ref.actor.optim.warmup_style": "actor_rollout_ref.actor.optim.lr_scheduler_type",
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.async_pipeline": "trainer.async_pipeline",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": (
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes": (
        "actor_rollout_ref.rollout.param_update_preduce_bucket_size_mb"
    ),
    "critic.fsdp": "critic.model.fsdp_config",
    "critic.grad_clip": "critic.optim.clip_grad",
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.ulysses_sequence_parallel_size": (
        "critic.model.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "data.balance_dp_token": "trainer.balance_batch",
    "engine.cpu_offload": "engine.param_offload",
    "engine.offload_params": "engine.param_offload",
    "model.fsdp_config": "engine",
    "model.partial_pretrain": "model.path",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "pools.actor_train": "pools.actor-train",
    "ray_init": "ray_kwargs.ray_init",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.reward_manager": "reward_model.reward_manager",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
    "reward_model.ulysses_sequence_parallel_size": (
        "reward_model.model.fsdp_config.ulysses_sequence_parallel_size"
    ),
    "reward_model.overlong_buffer": "reward_model.reward_kwargs.overlong_buffer_cfg",
    "trainer.max_ckpt_to_keep": "trainer.max_actor_ckpt_to_keep",
    "trainer.sperated_node_ratios": "trainer.separated_node_ratios",
    "trainer.sperated_node_tasks": "trainer.separated_node_tasks",
    "ulysses_sequence_parallel_size": "engine.ulysses_sequence_parallel_size",
}
"""Spelling -> key or section. A spelling applies only if the schema does not define it itself."""


def canonical_name(schema: type[BaseModel], name: str) -> str:
    """Return the key that ``name`` means in this schema; ``name`` itself if it is not an alias."""
    if find_key(schema, name) is not None or is_section(schema, name):
        return name
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        meant = ALIASES.get(".".join(parts[:size]))
        if meant is None:
            continue
        full = ".".join([meant, *parts[size:]])
        if find_key(schema, full) is not None or is_section(schema, full):
            return full
        return canonical_name(schema, full)
    return name
