# SPDX-License-Identifier: Apache-2.0
"""The choice of tokens by the covariance of their advantage and log-prob (arXiv:2505.22617).

The entropy of a policy falls in proportion to this covariance, which is very large for a few
tokens. ``clip_cov`` removes the gradient of some of them, and ``kl_cov`` keeps them near the old
policy. The means and the choice are over a whole mini-batch under the current policy, as in the
paper, and do not depend on micro-batches.

Shapes: R response tokens.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.losses import PolicyTerms, clipped_ratio
from tandem.config.schema.actor import ActorConfig


def mark_tokens(
    terms: PolicyTerms, settings: ActorConfig, *, loss_mode: str, random: np.random.Generator
) -> Tensor:
    """Return which tokens of a mini-batch ``clip_cov`` or ``kl_cov`` treats separately, bool (R,).

    Args:
        terms: all tokens of the mini-batch, on the CPU.
        random: the source of the choice of ``clip_cov`` among equals.
    """
    kept_R = terms.kept_R
    if kept_R is None:
        kept_R = torch.ones_like(terms.logp_R, dtype=torch.bool)
    marked_R = torch.zeros_like(kept_R)
    if not kept_R.any():
        return marked_R
    covariance_R = _covariance(terms, kept_R)
    keys, num_kept = settings.policy_loss, int(kept_R.sum())
    if loss_mode == "kl_cov":
        count = max(1, int(num_kept * keys.kl_cov_ratio))
        ranked_R = torch.where(kept_R, covariance_R, -torch.inf)
        marked_R[ranked_R.topk(count).indices] = True
        return marked_R
    bounded_R = (covariance_R > keys.clip_cov_lb) & (covariance_R < keys.clip_cov_ub)
    eligible = (kept_R & bounded_R & ~clipped_ratio(terms, settings)).nonzero()[:, 0]
    count = max(1, int(num_kept * keys.clip_cov_ratio))
    chosen = torch.as_tensor(random.permutation(len(eligible))[:count])
    marked_R[eligible[chosen]] = True
    return marked_R


def _covariance(terms: PolicyTerms, kept_R: Tensor) -> Tensor:
    """Return ``(advantage - mean) * (log-prob - mean)`` of each token, fp64 (R,)."""
    deviations = (
        values_R.double() - values_R[kept_R].double().mean()
        for values_R in (terms.advantages_R, terms.logp_R.detach())
    )
    first_R, second_R = deviations
    return first_R * second_R
