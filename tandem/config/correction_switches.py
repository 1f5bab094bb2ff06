# SPDX-License-Identifier: Apache-2.0
"""Which keys the off-policy correction switches off, and which are switched off in it; see
``switches``.
"""

from __future__ import annotations

from tandem.config.run import RunConfig
from tandem.config.switches import Condition

_KEY = "algorithm.rollout_correction"
_ACTOR = "actor_rollout_ref.actor"


def _reinforces(config: RunConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and correction.loss_type == "reinforce"


def _clips_to_rollout(config: RunConfig) -> bool:
    correction = config.algorithm.rollout_correction
    return correction.bypass_mode and correction.loss_type == "ppo_clip"


CORRECTION_CONDITIONS: tuple[Condition, ...] = (
    Condition(
        (f"{_KEY}.loss_type",),
        lambda c: not c.algorithm.rollout_correction.bypass_mode,
        f"only {_KEY}.bypass_mode=True reads it",
    ),
    Condition(
        (f"{_KEY}.rollout_is",),
        _clips_to_rollout,
        "bypass_mode with loss_type=ppo_clip: the ratio of the loss is the weight",
    ),
    Condition(
        (f"{_KEY}.rollout_is_threshold", f"{_KEY}.rollout_is_batch_normalize"),
        lambda c: c.importance_level is None,
        "no importance weights are applied: see rollout_is, and bypass_mode",
    ),
    Condition(
        (f"{_KEY}.rollout_rs_threshold",),
        lambda c: c.algorithm.rollout_correction.rollout_rs is None,
        f"{_KEY}.rollout_rs=null",
    ),
    Condition(
        (
            f"{_ACTOR}.policy_loss.loss_mode",
            f"{_ACTOR}.clip_ratio",
            f"{_ACTOR}.clip_ratio_low",
            f"{_ACTOR}.clip_ratio_high",
            f"{_ACTOR}.clip_ratio_c",
        ),
        _reinforces,
        f"{_KEY}.loss_type=reinforce does not clip and replaces the loss",
    ),
)
