# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction by importance weights and rejection.

The behaviour policy sampled the tokens; training starts from the proximal policy. The decoupled
objective of arXiv:2110.00641 (section 3; for language models arXiv:2505.24298) is
``w * clipped ratio(current / proximal)``. The weight ``w`` is ``proximal / behaviour``, truncated
(arXiv:1802.01561, section 4.1) or set to 0 outside its bounds (IcePop), and has no gradient. Names
and conventions are verl's (``algorithm.rollout_correction.*``, ``rollout_corr/*``).

Shapes: R response tokens, N sequences, K lags (0 .. K-1).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.kl import LOG_RATIO_LIMIT
from tandem.algorithms.sequences import count_by_sequence, sum_by_sequence

PREFIX = "rollout_corr/"
_SUM_PREFIX = "lag_sum/"
_COUNT = "count"
CLIPPED = "clipped"
REJECTED = "rejected"
"""The keys of ``lag_sums`` for clipped and for rejected tokens of the policy loss."""
_FIGURES = {
    "kl": f"{PREFIX}kl",
    "k3_kl": f"{PREFIX}k3_kl",
    "weight": f"{PREFIX}rollout_is_mean",
    "high": f"{PREFIX}rollout_is_ratio_fraction_high",
    "low": f"{PREFIX}rollout_is_ratio_fraction_low",
    CLIPPED: "actor/pg_clipfrac",
    REJECTED: f"{PREFIX}rollout_rs_masked_fraction",
}


@dataclass(frozen=True, slots=True)
class ImportanceSampling:
    """Importance sampling by token, or by sequence (the product over its tokens).

    Without ``lower``, weights are truncated at ``upper``; with it, weights outside the bounds are
    set to 0. With ``in_survey``, ``PolicyLoss.survey`` computes them, divided by their mean over
    the mini-batch.
    """

    by_sequence: bool
    lower: float | None
    upper: float
    in_survey: bool = False


@dataclass(frozen=True, slots=True)
class Rejection:
    """A rule that excludes tokens or sequences whose divergence leaves ``lower .. upper``.

    ``option`` is verl's (``token_k1``, ``seq_mean_k3``, ...): a reduction, and an estimator of
    KL(behaviour || proximal). k1 is ``log(behaviour / proximal)``, bounded on both sides by the
    logarithms of the bounds; k2, k3 and ``seq_max_k1`` are bounded by ``upper`` alone.
    """

    option: str
    lower: float | None
    upper: float


@dataclass(frozen=True, slots=True)
class Correction:
    """The corrections to apply; with neither, the mismatch is only measured.

    ``monitored_upper`` bounds the ratios in metrics if no weight is applied.
    """

    importance: ImportanceSampling | None
    rejections: tuple[Rejection, ...]
    monitored_upper: float


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The log-probs of the same tokens under both policies, fp32 (R,), detached.

    ``counted_R`` is false for tokens excluded from training; None if none is.
    """

    proximal_logp_R: Tensor
    behaviour_logp_R: Tensor
    sequence_R: Tensor
    num_sequences: int
    counted_R: Tensor | None = None

    def log_ratio(self) -> Tensor:
        """Return ``log(proximal / behaviour)``, 0 where not counted, (R,)."""
        log_ratio_R = self.proximal_logp_R - self.behaviour_logp_R
        if self.counted_R is None:
            return log_ratio_R
        return torch.where(self.counted_R, log_ratio_R, 0.0)

    def counts(self) -> Tensor:
        """Return 1 for tokens that count, else 0, fp32 (R,)."""
        if self.counted_R is None:
            return torch.ones_like(self.proximal_logp_R)
        return self.counted_R.to(self.proximal_logp_R.dtype)

    def sum(self, values_R: Tensor) -> Tensor:
        """Sum over each sequence, (N,)."""
        return sum_by_sequence(values_R, self.sequence_R, num_sequences=self.num_sequences)

    def mean(self, values_R: Tensor) -> Tensor:
        """Average over each sequence, (N,)."""
        length_N = count_by_sequence(self.sequence_R, self.num_sequences).clamp(min=1)
        return self.sum(values_R) / length_N

    def max(self, values_R: Tensor) -> Tensor:
        """Return the largest value of each sequence, 0 for an empty one, (N,)."""
        zero_N = values_R.new_zeros(self.num_sequences)
        return zero_N.scatter_reduce(0, self.sequence_R, values_R, "amax", include_self=False)


def raw_weights(mismatch: Mismatch, *, by_sequence: bool) -> Tensor:
    """Compute ``proximal / behaviour`` by token or sequence, with a clamped logarithm, (R,)."""
    log_ratio_R = mismatch.log_ratio()
    if by_sequence:
        log_ratio_R = mismatch.sum(log_ratio_R)[mismatch.sequence_R]
    return log_ratio_R.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def importance_weights(mismatch: Mismatch, sampling: ImportanceSampling) -> Tensor:
    """Compute the factors of the token losses, (R,)."""
    weights_R = raw_weights(mismatch, by_sequence=sampling.by_sequence)
    if sampling.lower is None:
        return weights_R.clamp(max=sampling.upper)
    inside_R = (weights_R >= sampling.lower) & (weights_R <= sampling.upper)
    return torch.where(inside_R, weights_R, 0.0)


def normalized(weights_R: Tensor, mismatch: Mismatch, *, by_sequence: bool) -> Tensor:
    """Scale weights to mean 1 over the tokens that count, or over the sequences, (R,)."""
    counts_R = mismatch.counts()
    if by_sequence:
        counts_R = counts_R / mismatch.sum(counts_R).clamp(min=1)[mismatch.sequence_R]
    mean = (weights_R * counts_R).sum() / counts_R.sum().clamp(min=1e-8)
    return torch.where(mean > 1e-8, weights_R / mean, weights_R)


def kept_tokens(mismatch: Mismatch, rejection: Rejection) -> Tensor:
    """Return whether ``rejection`` keeps each token, bool (R,)."""
    value_R = _divergence(mismatch, rejection.option)
    if rejection.lower is None:
        return value_R <= rejection.upper
    return (value_R >= math.log(rejection.lower)) & (value_R <= math.log(rejection.upper))


def all_kept(mismatch: Mismatch, rejections: tuple[Rejection, ...]) -> Tensor:
    """Return whether all rejections keep each token, bool (R,)."""
    kept_R = torch.ones_like(mismatch.proximal_logp_R, dtype=torch.bool)
    for rejection in rejections:
        kept_R &= kept_tokens(mismatch, rejection)
    return kept_R


def _divergence(mismatch: Mismatch, option: str) -> Tensor:
    """Return the estimate of ``option`` for each token or for its sequence, (R,)."""
    log_ratio_R = mismatch.log_ratio().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    estimates = {
        "k1": -log_ratio_R,
        "k2": 0.5 * log_ratio_R.square(),
        "k3": log_ratio_R.exp() - 1 - log_ratio_R,
    }
    level, estimator = option.rsplit("_", 1)
    value_R = estimates[estimator]
    reductions = {"seq_sum": mismatch.sum, "seq_mean": mismatch.mean, "seq_max": mismatch.max}
    if level == "token":
        return value_R
    return reductions[level](value_R)[mismatch.sequence_R]


def lag_sums(
    values: Mapping[str, Tensor], *, counts_R: Tensor, lag_R: Tensor, num_lags: int
) -> dict[str, Tensor]:
    """Sum each of ``values`` (R,) by lag.

    The sums add up over micro-batches; ``metrics_by_lag`` turns them into means.

    Args:
        counts_R: 1 for tokens that count, else 0.
        lag_R: the lag of each token, int64 (R,), below ``num_lags``.
    """
    columns = {_COUNT: torch.ones_like(counts_R), **values}
    values_RM = torch.stack(list(columns.values()), dim=1) * counts_R[:, None]
    sums_KM = values_RM.new_zeros(num_lags, len(columns)).index_add(0, lag_R, values_RM)
    return {
        f"{_SUM_PREFIX}{name}/{lag}": sums_KM[lag, index]
        for lag in range(num_lags)
        for index, name in enumerate(columns)
    }


def monitored(mismatch: Mismatch, correction: Correction) -> dict[str, Tensor]:
    """Return the quantities of a mismatch that ``lag_sums`` adds up, each (R,)."""
    log_ratio_R = mismatch.log_ratio()
    sampling = correction.importance
    by_sequence = sampling is not None and sampling.by_sequence
    raw_R = raw_weights(mismatch, by_sequence=by_sequence)
    applied_R = raw_R if sampling is None else importance_weights(mismatch, sampling)
    upper = correction.monitored_upper if sampling is None else sampling.upper
    lower = 1 / upper if sampling is None or sampling.lower is None else sampling.lower
    return {
        "kl": -log_ratio_R,
        "k3_kl": log_ratio_R.clamp(max=LOG_RATIO_LIMIT).exp() - log_ratio_R - 1,
        "weight": applied_R,
        "square": applied_R.square(),
        "high": (raw_R > upper).float(),
        "low": (raw_R < lower).float(),
    }


def metrics_by_lag(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums of ``lag_sums`` in ``metrics`` by means over all tokens and by lag.

    The results are ``rollout_corr/*`` and ``actor/pg_clipfrac``. The effective sample size is a
    share of tokens, ``mean(w)^2 / mean(w^2)`` (Kish 1965). With more than one lag, each lag k that
    has tokens adds ``<name>/lag_k``. Other metrics stay unchanged.
    """
    sums: dict[int, dict[str, float]] = {}
    others: dict[str, float] = {}
    for name, value in metrics.items():
        if not name.startswith(_SUM_PREFIX):
            others[name] = value
            continue
        quantity, lag = name.removeprefix(_SUM_PREFIX).split("/")
        sums.setdefault(int(lag), {})[quantity] = value
    if not sums:
        return others
    total = {quantity: sum(row[quantity] for row in sums.values()) for quantity in sums[0]}
    figures = {name: value for name, value in _figures(total).items() if name not in others}
    if len(sums) > 1:
        for lag, row in sums.items():
            figures.update({f"{name}/lag_{lag}": value for name, value in _figures(row).items()})
    return others | figures


def _figures(sums: Mapping[str, float]) -> dict[str, float]:
    count = sums[_COUNT]
    if count <= 0:
        return {}
    mean = {name: value / count for name, value in sums.items()}
    figures = {_FIGURES[name]: value for name, value in mean.items() if name in _FIGURES}
    if "square" in mean:
        weight, square = mean["weight"], mean["square"]
        effective = weight * weight / square if square > 0 else 0.0
        figures[f"{PREFIX}rollout_is_eff_sample_size"] = effective
        figures[f"{PREFIX}rollout_is_std"] = math.sqrt(max(square - weight * weight, 0.0))
    return figures
