# SPDX-License-Identifier: Apache-2.0
"""Policy losses per response token.

``POLICY_LOSSES`` holds the built-in ones; docs/extend/policy_loss.md explains how to add one.
``policy_loss.PolicyLoss`` adds aggregation, entropy and the KL term.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.kl import LOG_RATIO_LIMIT
from tandem.algorithms.sequences import count_by_sequence, sum_by_sequence
from tandem.config.schema.imports import import_dotted
from tandem.errors import UserError

_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
_SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class ClipRange:
    """The bounds of the ratio of new to old probability: ``1 - low`` to ``1 + high``.

    ``high > low`` is DAPO's clip-higher. ``dual`` bounds the ratio where the advantage is negative
    (verl's ``clip_ratio_c``, arXiv:1912.09729).
    """

    low: float
    high: float
    dual: float


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The inputs of a policy loss, fp32 (R,); the gradient flows through ``logp_R`` only.

    Attributes:
        logp_R: the log-probs of the tokens under the policy in training.
        old_logp_R: their log-probs under the policy before the update.
        advantages_R: the advantages.
        sequence_R: the sequence of each token, int64, ascending.
        num_sequences: N.
    """

    logp_R: Tensor
    old_logp_R: Tensor
    advantages_R: Tensor
    sequence_R: Tensor
    num_sequences: int

    def log_ratio(self) -> Tensor:
        """Return ``log(policy / old policy)``, clamped to +-20, (R,)."""
        return (self.logp_R - self.old_logp_R).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def mean_by_sequence(self, values_R: Tensor) -> Tensor:
        """Average over each sequence's tokens, (N,)."""
        length_N = count_by_sequence(self.sequence_R, self.num_sequences).clamp(min=1)
        sum_N = sum_by_sequence(values_R, self.sequence_R, num_sequences=self.num_sequences)
        return sum_N / length_N


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """The result of a policy loss.

    Attributes:
        loss_R: the loss of each token.
        clipped_R: whether clipping changed it, bool; reported as ``actor/pg_clipfrac``.
        clipped_lower_R: whether the dual bound changed it, bool; ``actor/pg_clipfrac_lower``.
    """

    loss_R: Tensor
    clipped_R: Tensor
    clipped_lower_R: Tensor


PolicyLossFunction = Callable[[PolicyTerms, ClipRange], TokenLosses]


def _clipped_surrogate(ratio_R: Tensor, advantages_R: Tensor, *, clip: ClipRange) -> TokenLosses:
    """Compute PPO's pessimistic bound (arXiv:1707.06347)."""
    unclipped_R = -advantages_R * ratio_R
    clipped_R = -advantages_R * ratio_R.clamp(1 - clip.low, 1 + clip.high)
    loss_R = torch.maximum(unclipped_R, clipped_R)
    return TokenLosses(loss_R, clipped_R > unclipped_R, torch.zeros_like(loss_R, dtype=torch.bool))


def vanilla(terms: PolicyTerms, clip: ClipRange) -> TokenLosses:
    """Clip as PPO, with two ranges (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729)."""
    surrogate = _clipped_surrogate(terms.log_ratio().exp(), terms.advantages_R, clip=clip)
    bound_R = -terms.advantages_R * clip.dual
    bounded_R = (terms.advantages_R < 0) & (surrogate.loss_R > bound_R)
    loss_R = torch.where(bounded_R, bound_R, surrogate.loss_R)
    return TokenLosses(loss_R, surrogate.clipped_R, bounded_R)


def gspo(terms: PolicyTerms, clip: ClipRange) -> TokenLosses:
    """Clip the geometric mean of each sequence's ratios (GSPO-token, arXiv:2507.18071)."""
    log_ratio_N = terms.mean_by_sequence((terms.logp_R - terms.old_logp_R).detach())
    own_gradient_R = terms.logp_R - terms.logp_R.detach()
    log_ratio_R = own_gradient_R + log_ratio_N[terms.sequence_R]
    ratio_R = log_ratio_R.clamp(max=_SEQUENCE_LOG_RATIO_LIMIT).exp()
    return _clipped_surrogate(ratio_R, terms.advantages_R, clip=clip)


def cispo(terms: PolicyTerms, clip: ClipRange) -> TokenLosses:
    """Weight REINFORCE by the detached clipped ratio; drop no token (arXiv:2506.13585)."""
    ratio_R = terms.log_ratio().detach().exp()
    clipped_ratio_R = ratio_R.clamp(1 - clip.low, 1 + clip.high)
    loss_R = -clipped_ratio_R * terms.advantages_R * terms.logp_R
    none_R = torch.zeros_like(ratio_R, dtype=torch.bool)
    return TokenLosses(loss_R, ratio_R != clipped_ratio_R, none_R)


def gpg(terms: PolicyTerms, clip: ClipRange) -> TokenLosses:
    """Compute the plain policy gradient, without ratio or clipping (arXiv:2504.02546)."""
    none_R = torch.zeros_like(terms.logp_R, dtype=torch.bool)
    return TokenLosses(-terms.logp_R * terms.advantages_R, none_R, none_R)


def geo_mean(terms: PolicyTerms, clip: ClipRange) -> TokenLosses:
    """Weight a sequence by the geometric mean of its clipped ratios (GMPO, arXiv:2507.20673).

    Every token gets the loss of its sequence. ``clip`` bounds the log-ratio to ``-low .. high``.
    ``clipped_R`` marks clipped tokens with a positive advantage, ``clipped_lower_R`` those with a
    negative one.
    """
    log_ratio_R = terms.log_ratio()
    bounded_R = log_ratio_R.clamp(-clip.low, clip.high)
    sign_R = terms.advantages_R.sign()
    pessimistic_R = sign_R * torch.minimum(sign_R * log_ratio_R, sign_R * bounded_R)
    ratio_N = terms.mean_by_sequence(pessimistic_R).exp()
    loss_N = -terms.mean_by_sequence(terms.advantages_R) * ratio_N
    clipped_R = log_ratio_R != bounded_R
    return TokenLosses(
        loss_N[terms.sequence_R],
        clipped_R & (terms.advantages_R > 0),
        clipped_R & (terms.advantages_R < 0),
    )


POLICY_LOSSES: dict[str, PolicyLossFunction] = {
    "cispo": cispo,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "gspo": gspo,
    "vanilla": vanilla,
}


def compute_loss(terms: PolicyTerms, clip: ClipRange, *, loss_mode: str) -> TokenLosses:
    """Apply the policy loss ``loss_mode``.

    Raises:
        UserError: a user's function cannot be imported, or does not return ``TokenLosses`` of
            tensors (R,).
    """
    if loss_mode in POLICY_LOSSES:
        return POLICY_LOSSES[loss_mode](terms, clip)
    found: Any = import_dotted(_KEY, loss_mode)(terms, clip)
    shape = terms.logp_R.shape
    fields = ("loss_R", "clipped_R", "clipped_lower_R")
    if not isinstance(found, TokenLosses):
        fault = f"returned {type(found).__name__}"
    elif wrong := [field for field in fields if getattr(found, field).shape != shape]:
        fault = f"returned {wrong[0]} of shape {tuple(getattr(found, wrong[0]).shape)}"
    else:
        return found
    raise UserError(
        _KEY,
        loss_mode,
        rule=fault,
        remedy="Return tandem.algorithms.losses.TokenLosses, one entry for each response token.",
    )
