# SPDX-License-Identifier: Apache-2.0
"""KL divergence from sampled tokens: estimators, penalty in the reward, and its coefficient.

The estimators follow J. Schulman, "Approximating KL divergence" (2020): k1 is unbiased, k2 has the
right gradient, k3 is unbiased with low variance. A trailing ``+`` keeps the value and takes the
gradient of k2. All read the log-probs of the sampled tokens only, never the whole vocabulary.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tandem.algorithms.sequences import count_by_sequence, last_tokens, sum_by_sequence

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp, so that fp32 stays finite."""
_K3_LIMIT = 10.0

KlEstimator = Callable[[Tensor, Tensor], Tensor]


def _k1(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    return logp_R - ref_logp_R


def _absolute(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    return (logp_R - ref_logp_R).abs()


def _k2(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    return 0.5 * (logp_R - ref_logp_R).square()


def _k3(logp_R: Tensor, ref_logp_R: Tensor) -> Tensor:
    log_ratio_R = (ref_logp_R - logp_R).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    # The outer clamp zeroes the gradient of a token whose ratio diverged, as in verl.
    return (log_ratio_R.exp() - log_ratio_R - 1).clamp(-_K3_LIMIT, _K3_LIMIT)


KL_ESTIMATORS: dict[str, KlEstimator] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _absolute,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
"""The values of ``kl_loss_type`` and ``algorithm.kl_penalty``; each may carry a trailing ``+``."""


def estimate_kl(logp_R: Tensor, ref_logp_R: Tensor, *, kind: str) -> Tensor:
    """Estimate KL(policy || reference) of each token, (R,); the gradient flows through ``logp_R``.

    Raises:
        ValueError: ``kind`` is unknown.
    """
    estimator = KL_ESTIMATORS.get(kind.removesuffix("+"))
    if estimator is None:
        raise ValueError(
            f"kl={kind!r}: unknown estimator. "
            f"Use one of {', '.join(KL_ESTIMATORS)}, optionally with a trailing '+'."
        )
    value_R = estimator(logp_R, ref_logp_R)
    if not kind.endswith("+"):
        return value_R
    gradient_R = _k2(logp_R, ref_logp_R)
    return gradient_R - gradient_R.detach() + value_R.detach()


def place_scores(scores_N: Tensor, sequence_R: Tensor) -> Tensor:
    """Place each sequence's score at its last token, and 0 at the others, (R,)."""
    return torch.where(last_tokens(sequence_R), scores_N[sequence_R], 0.0)


def penalise_rewards(token_rewards_R: Tensor, kl_R: Tensor, *, coefficient: float) -> Tensor:
    """Compute ``r_t - coefficient * kl_t`` (``algorithm.use_kl_in_reward``), (R,)."""
    return token_rewards_R - coefficient * kl_R


def mean_sequence_kl(kl_R: Tensor, sequence_R: Tensor, *, num_sequences: int) -> Tensor:
    """Average the mean KL per token over sequences: the input of ``AdaptiveKl``, a scalar."""
    length_N = count_by_sequence(sequence_R, num_sequences).clamp(min=1)
    return (sum_by_sequence(kl_R, sequence_R, num_sequences=num_sequences) / length_N).mean()


@dataclass(frozen=True, slots=True)
class FixedKl:
    """A constant coefficient of the KL in the reward."""

    coefficient: float


@dataclass(frozen=True, slots=True)
class AdaptiveKl:
    """A coefficient that steers the KL to ``target`` (arXiv:1909.08593); ``horizon`` in sequences.

    Raises:
        ValueError: ``target`` or ``horizon`` is not positive.
    """

    coefficient: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        if self.target <= 0 or self.horizon <= 0:
            raise ValueError(
                f"algorithm.kl_ctrl.target_kl={self.target}, horizon={self.horizon}: "
                "both must be positive."
            )


KlController = FixedKl | AdaptiveKl


def next_kl_controller(
    controller: KlController, *, mean_kl: float, num_sequences: int
) -> KlController:
    """Return the controller for the step after ``num_sequences`` sequences with ``mean_kl``."""
    if isinstance(controller, FixedKl):
        return controller
    error = min(max(mean_kl / controller.target - 1, -0.2), 0.2)
    factor = 1 + error * num_sequences / controller.horizon
    return replace(controller, coefficient=controller.coefficient * factor)
