# SPDX-License-Identifier: Apache-2.0
"""Policy losses that tests begin from."""

from __future__ import annotations

from dataclasses import replace

from tandem.algorithms.policy_loss import PolicyLoss

PLAIN = PolicyLoss(
    loss_mode="vanilla",
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=3.0,
    loss_agg_mode="token-mean",
    loss_scale_factor=None,
    entropy_coeff=0.0,
    calculate_entropy=False,
    use_kl_loss=False,
    kl_loss_coef=0.0,
    kl_loss_type="low_var_kl",
)
WITH_ALL_TERMS = replace(
    PLAIN,
    loss_agg_mode="seq-mean-token-mean",
    entropy_coeff=0.01,
    calculate_entropy=True,
    use_kl_loss=True,
    kl_loss_coef=0.05,
)
"""Entropy and KL besides the policy's."""
