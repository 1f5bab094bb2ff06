# SPDX-License-Identifier: Apache-2.0
"""Policy losses per response token.

``POLICY_LOSSES`` holds the built-in ones; docs/extend/policy_loss.md explains how to add one.
``policy_loss.PolicyLoss`` adds aggregation, entropy and the KL term.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from tandem.algorithms.kl import LOG_RATIO_LIMIT
from tandem.algorithms.sequences import count_by_sequence, sum_by_sequence
from tandem.config.schema.actor import ActorConfig
from tandem.config.schema.imports import import_dotted
from tandem.errors import UserError

_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"
_SEQUENCE_LOG_RATIO_LIMIT = 10.0


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """The inputs of a policy loss, fp32 (R,); the gradient flows through ``logp_R`` only.

    Attributes:
        logp_R: the log-probs of the tokens under the policy in training.
        old_logp_R: their log-probs under the policy before the update.
        advantages_R: the advantages.
        sequence_R: the sequence of each token, int64, ascending.
        num_sequences: N.
        kept_R: whether rejection keeps a token, bool; None if all tokens are kept.
        marked_R: whether the loss treats a token apart, bool (``covariance.mark_tokens``); None if
            it marks none.
    """

    logp_R: Tensor
    old_logp_R: Tensor
    advantages_R: Tensor
    sequence_R: Tensor
    num_sequences: int
    kept_R: Tensor | None = None
    marked_R: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """Return ``log(policy / old policy)``, clamped to +-20, (R,)."""
        return (self.logp_R - self.old_logp_R).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)

    def mean_by_sequence(self, values_R: Tensor) -> Tensor:
        """Average over each sequence's kept tokens, 0 without one, (N,)."""
        length_N = count_by_sequence(self.sequence_R, self.num_sequences, kept_R=self.kept_R)
        if self.kept_R is not None:
            values_R = torch.where(self.kept_R, values_R, 0.0)
        sum_N = sum_by_sequence(values_R, self.sequence_R, num_sequences=self.num_sequences)
        return sum_N / length_N.clamp(min=1)


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


PolicyLossFunction = Callable[[PolicyTerms, ActorConfig], TokenLosses]


def _never(values_R: Tensor) -> Tensor:
    return torch.zeros_like(values_R, dtype=torch.bool)


def _clipped_surrogate(
    ratio_R: Tensor, advantages_R: Tensor, *, settings: ActorConfig
) -> TokenLosses:
    """Compute PPO's pessimistic bound (arXiv:1707.06347)."""
    unclipped_R = -advantages_R * ratio_R
    clipped_R = -advantages_R * ratio_R.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_R = torch.maximum(unclipped_R, clipped_R)
    return TokenLosses(loss_R, clipped_R > unclipped_R, _never(loss_R))


def vanilla(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Clip as PPO, with two ranges (DAPO, arXiv:2503.14476) and dual clip (arXiv:1912.09729)."""
    surrogate = _clipped_surrogate(terms.log_ratio().exp(), terms.advantages_R, settings=settings)
    bound_R = -terms.advantages_R * settings.clip_ratio_c
    bounded_R = (terms.advantages_R < 0) & (surrogate.loss_R > bound_R)
    loss_R = torch.where(bounded_R, bound_R, surrogate.loss_R)
    return TokenLosses(loss_R, surrogate.clipped_R, bounded_R)


def gspo(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Clip the geometric mean of each sequence's ratios (GSPO-token, arXiv:2507.18071)."""
    log_ratio_N = terms.mean_by_sequence((terms.logp_R - terms.old_logp_R).detach())
    own_gradient_R = terms.logp_R - terms.logp_R.detach()
    log_ratio_R = own_gradient_R + log_ratio_N[terms.sequence_R]
    ratio_R = log_ratio_R.clamp(max=_SEQUENCE_LOG_RATIO_LIMIT).exp()
    return _clipped_surrogate(ratio_R, terms.advantages_R, settings=settings)


def cispo(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Weight REINFORCE by the detached clipped ratio; drop no token (arXiv:2506.13585).

    The paper sets no lower bound: ``clip_ratio_low`` of 1 or more.
    """
    ratio_R = terms.log_ratio().detach().exp()
    clipped_ratio_R = ratio_R.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    loss_R = -clipped_ratio_R * terms.advantages_R * terms.logp_R
    return TokenLosses(loss_R, ratio_R != clipped_ratio_R, _never(loss_R))


def gpg(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Compute the plain policy gradient, without ratio or clipping (arXiv:2504.02546)."""
    none_R = _never(terms.logp_R)
    return TokenLosses(-terms.logp_R * terms.advantages_R, none_R, none_R)


def geo_mean(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Weight a sequence by the geometric mean of its clipped ratios (GMPO, arXiv:2507.20673).

    Every token gets the loss of its sequence. The clip range bounds the log-ratio. Importance
    weights are averaged in the same way as the ratios they multiply: a sequence is weighed by the
    geometric mean of its tokens' weights, as in verl (trait ``weighs_sequences``).
    ``clipped_R`` marks clipped tokens with a positive advantage, ``clipped_lower_R`` those with a
    negative one.
    """
    log_ratio_R = terms.log_ratio()
    bounded_R = log_ratio_R.clamp(-settings.clip_low, settings.clip_high)
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


def sapo(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Replace clipping by a smooth gate: ``4 / tau * sigmoid(tau * (ratio - 1))``
    (arXiv:2511.20347).

    The gate's slope is 1 where the policies agree and falls on both sides; tau is ``tau_pos`` for
    positive advantages, else ``tau_neg``.
    """
    ratio_R = terms.log_ratio().exp()
    tau_R = torch.where(terms.advantages_R > 0, settings.tau_pos, settings.tau_neg)
    gate_R = 4 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1))
    none_R = _never(ratio_R)
    return TokenLosses(-gate_R * terms.advantages_R, none_R, none_R)


def dppo_tv(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Drop tokens whose probability has moved too far in the direction of their advantage: by more
    than the clip range, the total variation of a choice between this token and all others
    (arXiv:2602.04879).
    """
    moved_R = (terms.logp_R.exp() - terms.old_logp_R.exp()).detach()
    rises_R = terms.advantages_R > 0
    far_R = torch.where(rises_R, moved_R > settings.clip_high, moved_R < -settings.clip_low)
    return _inside_divergence(terms, far_R, limit=settings.clip_ratio_c)


def dppo_kl(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Drop tokens as ``dppo_tv`` does, with another measure: the KL of the old policy from the
    current one, for a choice between the token and all others (arXiv:2602.04879).
    """
    logp_R = terms.logp_R.detach()
    new_R, old_R = logp_R.exp(), terms.old_logp_R.exp()
    other_R, old_other_R = ((1 - x_R).clamp(min=0) + 1e-8 for x_R in (new_R, old_R))
    kl_R = old_R * (terms.old_logp_R - logp_R) + (1 - old_R) * (old_other_R / other_R).log()
    far_R = torch.where(
        terms.advantages_R > 0,
        (kl_R > settings.clip_high) & (new_R > old_R),
        (kl_R > settings.clip_low) & (new_R < old_R),
    )
    return _inside_divergence(terms, far_R, limit=settings.clip_ratio_c)


def _inside_divergence(terms: PolicyTerms, far_R: Tensor, *, limit: float) -> TokenLosses:
    """Weight REINFORCE by the detached ratio, at most ``limit``, and by 0 for far tokens."""
    ratio_R = terms.log_ratio().detach().exp()
    weight_R = torch.where(far_R, 0.0, ratio_R.clamp(max=limit))
    loss_R = -terms.advantages_R * weight_R * terms.logp_R
    return TokenLosses(loss_R, far_R, (ratio_R > limit) & ~far_R)


def dro(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Add a penalty on the log-ratio instead of clipping: ``dro_beta / 2 * log_ratio^2``
    (arXiv:2405.19107).
    """
    assert settings.policy_loss.dro_beta is not None, "dro needs dro_beta"
    distance_R = (terms.logp_R - terms.old_logp_R).square()
    penalty_R = 0.5 * settings.policy_loss.dro_beta * distance_R
    none_R = _never(penalty_R)
    return TokenLosses(penalty_R - terms.advantages_R * terms.logp_R, none_R, none_R)


def clipped_ratio(terms: PolicyTerms, settings: ActorConfig) -> Tensor:
    """Return whether PPO's clipping changes the loss of a token, bool (R,)."""
    ratio_R = terms.log_ratio().detach().exp()
    return _clipped_surrogate(ratio_R, terms.advantages_R, settings=settings).clipped_R


def clip_cov(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Clip as PPO does, and remove the gradient of marked tokens (arXiv:2505.22617).

    ``clipped_R`` is the marked tokens, as in verl.
    """
    assert terms.marked_R is not None, "clip_cov marks tokens"
    ratio_R = terms.log_ratio().exp()
    surrogate = _clipped_surrogate(ratio_R, terms.advantages_R, settings=settings)
    loss_R = torch.where(terms.marked_R, 0.0, surrogate.loss_R)
    return TokenLosses(loss_R, terms.marked_R, surrogate.clipped_lower_R)


def kl_cov(terms: PolicyTerms, settings: ActorConfig) -> TokenLosses:
    """Weight by the ratio without clipping, and keep marked tokens near the old policy by a penalty
    on the absolute log-ratio (arXiv:2505.22617).
    """
    assert terms.marked_R is not None, "kl_cov marks tokens"
    distance_R = (terms.logp_R - terms.old_logp_R).abs()
    penalty_R = torch.where(terms.marked_R, settings.policy_loss.ppo_kl_coef * distance_R, 0.0)
    none_R = _never(penalty_R)
    loss_R = penalty_R - terms.advantages_R * terms.log_ratio().exp()
    return TokenLosses(loss_R, none_R, none_R)


POLICY_LOSSES: Mapping[str, PolicyLossFunction] = MappingProxyType(
    {
        "cispo": cispo,
        "clip_cov": clip_cov,
        "dppo_kl": dppo_kl,
        "dppo_tv": dppo_tv,
        "dro": dro,
        "geo_mean": geo_mean,
        "gpg": gpg,
        "gspo": gspo,
        "kl_cov": kl_cov,
        "sapo": sapo,
        "vanilla": vanilla,
    }
)


def compute_loss(terms: PolicyTerms, settings: ActorConfig, *, loss_mode: str) -> TokenLosses:
    """Apply the policy loss ``loss_mode``.

    Raises:
        UserError: a user's function cannot be imported, or does not return ``TokenLosses`` of
            tensors (R,), bool but for ``loss_R``.
    """
    if loss_mode in POLICY_LOSSES:
        return POLICY_LOSSES[loss_mode](terms, settings)
    found: Any = import_dotted(_KEY, loss_mode)(terms, settings)
    fault = _fault(found, terms.logp_R.shape)
    if fault is not None:
        raise _not_losses(loss_mode, fault)
    return found


def require_gradient(loss: Tensor, *, loss_mode: str) -> None:
    """Raise UserError if no gradient flows through the loss of a policy in training."""
    if not loss.requires_grad:
        raise _not_losses(loss_mode, "returned loss_R without a gradient")


def _fault(found: Any, shape: torch.Size) -> str | None:
    """Return why the result of a user's function is no ``TokenLosses`` of tensors of a shape."""
    if not isinstance(found, TokenLosses):
        return f"returned {type(found).__name__}"
    for name in ("loss_R", "clipped_R", "clipped_lower_R"):
        value: Any = getattr(found, name)
        if not isinstance(value, Tensor):
            return f"returned {name} of type {type(value).__name__}"
        if value.shape != shape:
            return f"returned {name} of shape {tuple(value.shape)}"
        if name != "loss_R" and value.dtype != torch.bool:
            return f"returned {name} of {value.dtype}, not bool"
    return None


def _not_losses(loss_mode: str, fault: str) -> UserError:
    return UserError(
        _KEY,
        loss_mode,
        rule=fault,
        remedy="Return tandem.algorithms.losses.TokenLosses, one entry for each response token. "
        "loss_R depends on logp_R, and the others are bool.",
    )
