# SPDX-License-Identifier: Apache-2.0
"""The defaults of verl's configurations, where they differ from tandem's and change a run.

verl's entry modules have these defaults (``python -m tandem.trainer.main_ppo``), and so has a
configuration that names one of verl's (``--config-name``, ``defaults:``). ``tandem train`` and
``tandem sft`` have those of the schema. ``tandem plan`` shows the ones that are in use. All other
defaults of verl give the same run: docs/from_verl.md compares them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Defaults = Mapping[str, Any]
"""Key -> value."""

_PPO: Defaults = {
    "algorithm.adv_estimator": "gae",
    "actor_rollout_ref.rollout.n": 1,
    "trainer.n_gpus_per_node": 8,
}
_SFT: Defaults = {
    "data.multiturn.enable": True,
    "data.use_dynamic_bsz": True,
    "optim.lr": 1e-3,
    "optim.betas": (0.9, 0.999),
    "optim.lr_scheduler_type": "constant",
    "optim.lr_warmup_steps_ratio": 0.0,
}

_MEGATRON: Defaults = {
    **_PPO,
    "actor_rollout_ref.model.lora_alpha": 32,
    "critic.model.lora_alpha": 32,
}
LORA: Defaults = {
    "lora_rank": 0,
    "lora_alpha": 16,
    "target_modules": "all-linear",
}
"""Key of a section of a model -> verl's default, which its engine for FSDP reads."""
LORA_OF_MEGATRON: Defaults = {
    "rank": 0,
    "alpha": 32,
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"],
    "exclude_modules": [],
}
"""Key below ``lora`` in such a section -> verl's default, which its engine for Megatron reads."""
_UNSET_BY_NULL = (
    "algorithm.filter_groups.metric",
    "algorithm.rollout_correction.rollout_is_threshold",
    "custom_reward_function.name",
    "reward.num_workers",
)
_UNSET_BY_NULL_IN_OPTIM = ("lr_scheduler_type", "lr_warmup_steps", "min_lr_ratio")

_APART: Defaults = {
    "actor_rollout_ref.hybrid_engine": False,
    "algorithm.rollout_correction.bypass_mode": True,
    "algorithm.rollout_correction.rollout_is": None,
    "rollout.nnodes": 1,
    "rollout.n_gpus_per_node": 8,
    "trainer.async_pipeline": True,
}
"""What verl's trainers with devices for generation have in common."""
_ONE_STEP_OFF: Defaults = {
    **_APART,
    "actor_rollout_ref.rollout.partial_rollout": False,
    "trainer.generate_ahead_steps": 1,
}
_FULLY_ASYNC: Defaults = {
    **_APART,
    "async_training.require_batches": 1,
    "async_training.trigger_parameter_sync_step": 4,
    "data.train_batch_size": 0,
    "rollout.total_rollout_steps": 100,
    "trainer.generate_ahead_steps": 0.1,
}
VERL_DEFAULTS: Mapping[str, Defaults] = {
    "ppo_trainer": _PPO,
    "ppo_megatron_trainer": _MEGATRON,
    "one_step_off_ppo_trainer": {**_PPO, **_ONE_STEP_OFF},
    "one_step_off_ppo_megatron_trainer": {**_MEGATRON, **_ONE_STEP_OFF},
    "fully_async_ppo_trainer": {**_PPO, **_FULLY_ASYNC},
    "fully_async_ppo_megatron_trainer": {**_MEGATRON, **_FULLY_ASYNC},
    "sft_trainer": {},
    "sft_trainer_engine": _SFT,
    "sft_trainer_megatron": _SFT,
}
"""Name of one of verl's configurations -> its defaults."""


def is_unset_by_null(name: str) -> bool:
    """Return whether null means in verl's configurations that the key is not given."""
    section, _, last = name.rpartition(".")
    is_of_optimizer = section.endswith("optim") and last in _UNSET_BY_NULL_IN_OPTIM
    is_precision = last == "dtype" and section.endswith(("fsdp_config", "engine"))
    is_of_reward = name.startswith("reward_model.") or name in _UNSET_BY_NULL
    return is_of_optimizer or is_precision or is_of_reward
