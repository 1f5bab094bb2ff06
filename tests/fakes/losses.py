# SPDX-License-Identifier: Apache-2.0
"""Policy losses that tests begin from."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.schema.actor import ActorConfig, PolicyLossConfig

_OWN = {field.name for field in fields(PolicyLoss)}


def changed(loss: PolicyLoss, **changes: Any) -> PolicyLoss:
    """Return the loss with other values of its fields, or of keys of the actor."""
    own = {name: value for name, value in changes.items() if name in _OWN}
    keys = {name: value for name, value in changes.items() if name not in _OWN}
    settings = ActorConfig(**{**loss.settings.model_dump(exclude_unset=True), **keys})
    return replace(loss, settings=settings, **own)


PLAIN = PolicyLoss(
    loss_mode="vanilla",
    settings=ActorConfig(
        clip_ratio_low=0.2, clip_ratio_high=0.28, policy_loss=PolicyLossConfig(dro_beta=0.3)
    ),
)
WITH_ALL_TERMS = changed(
    PLAIN,
    loss_agg_mode="seq-mean-token-mean",
    entropy_coeff=0.01,
    calculate_entropy=True,
    use_kl_loss=True,
    kl_loss_coef=0.05,
)
"""Entropy and KL besides the policy's."""
