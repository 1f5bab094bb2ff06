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

VERL_DEFAULTS: Mapping[str, Defaults] = {
    "ppo_trainer": _PPO,
    "ppo_megatron_trainer": _PPO,
    "sft_trainer": {},
    "sft_trainer_engine": _SFT,
    "sft_trainer_megatron": _SFT,
}
"""Name of one of verl's configurations -> its defaults."""
