# SPDX-License-Identifier: Apache-2.0
"""Off-policy correction of a batch whose old log-probs are known before the update: importance
weights, rejection, and verl's metrics ``rollout_corr/*``, in total and by lag.

With one optimizer step per batch, or with ``bypass_mode``, the old log-probs are not known before.
``PolicyLoss`` then corrects with those of its own forward pass, which saves a pass over the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.algorithms.kl import LOG_RATIO_LIMIT
from tandem.algorithms.off_policy import (
    PREFIX,
    Correction,
    ImportanceSampling,
    Mismatch,
    Rejection,
    all_kept,
    importance_weights,
    kept_tokens,
    lag_sums,
    metrics_by_lag,
    monitored,
    normalized,
    raw_weights,
)
from tandem.config.schema.run import RunConfig
from tandem.pipeline.batch import Batch


@dataclass(frozen=True, slots=True)
class CorrectedBatch:
    """The correction of a batch.

    Attributes:
        weights_R: importance weights, fp32; None without importance sampling.
        kept_R: whether rejection keeps a token, bool; None without rejection.
        metrics: ``rollout_corr/*``.
    """

    weights_R: Tensor | None
    kept_R: Tensor | None
    metrics: dict[str, float]


def correction_of(config: RunConfig) -> Correction | None:
    """Return the configured correction; None without one."""
    if not config.compares_policies:
        return None
    keys = config.algorithm.rollout_correction
    bounds = keys.importance_bounds
    importance = None
    if config.importance_level is not None:
        importance = ImportanceSampling(
            config.importance_level == "sequence",
            bounds.lower,
            bounds.upper,
            in_survey=keys.bypass_mode and keys.rollout_is_batch_normalize,
        )
    rejections = tuple(Rejection(name, b.lower, b.upper) for name, b in keys.rejections)
    return Correction(importance, rejections, monitored_upper=bounds.upper)


def correct_batch(batch: Batch, config: RunConfig) -> CorrectedBatch | None:
    """Return the correction of a batch; None if there is none or the loss computes it."""
    correction = correction_of(config)
    keys = config.algorithm.rollout_correction
    if correction is None or keys.bypass_mode or batch.old_logp_R is None:
        return None
    mismatch = Mismatch(
        batch.old_logp_R,
        batch.rollout_logp_R,
        batch.sequence_R,
        len(batch.sequences),
        counted_R=batch.valid_N[batch.sequence_R],
    )
    max_lag = config.trainer.max_lag
    sums = lag_sums(
        monitored(mismatch, correction),
        counts_R=mismatch.counts(),
        lag_R=batch.lag_R.clamp(0, max_lag),
        num_lags=max_lag + 1,
    )
    metrics = metrics_by_lag({name: value.item() for name, value in sums.items()})
    metrics |= _mismatch_metrics(mismatch)
    weights_R = kept_R = None
    if correction.importance is not None:
        weights_R = importance_weights(mismatch, correction.importance)
        metrics |= _weight_metrics(weights_R, mismatch, sampling=correction.importance)
        if keys.rollout_is_batch_normalize:
            applied_R, by_sequence = weights_R, correction.importance.by_sequence
            weights_R = normalized(applied_R, mismatch, by_sequence=by_sequence)
            factor = (applied_R.sum() / weights_R.sum()).item() if weights_R.any() else 1.0
            metrics[f"{PREFIX}rollout_is_batch_norm_factor"] = factor
    if correction.rejections:
        kept_R = all_kept(mismatch, correction.rejections)
        metrics |= _rejection_metrics(mismatch, correction.rejections)
    return CorrectedBatch(weights_R, kept_R, metrics)


def _weight_metrics(
    weights_R: Tensor, mismatch: Mismatch, *, sampling: ImportanceSampling
) -> dict[str, float]:
    """Return the extremes of the weights, and statistics of their means over sequences.

    As in verl, the extremes are those of the applied weights of tokens, and of the raw weights of
    sequences.
    """
    counts_R = mismatch.counts()
    has_tokens_N = mismatch.sum(counts_R) > 0
    if not has_tokens_N.any():
        return {}
    raw_R = raw_weights(mismatch, by_sequence=sampling.by_sequence)
    extreme_R = (raw_R if sampling.by_sequence else weights_R)[counts_R > 0]
    mean_N, raw_N = (mismatch.mean(x_R)[has_tokens_N] for x_R in (weights_R, raw_R))
    lower = 1 / sampling.upper if sampling.lower is None else sampling.lower
    values = {
        "max": extreme_R.max(),
        "min": extreme_R.min(),
        "seq_mean": mean_N.mean(),
        "seq_std": mean_N.std() if len(mean_N) > 1 else torch.zeros(()),
        "seq_max": mean_N.max(),
        "seq_min": mean_N.min(),
        "seq_max_deviation": (mean_N - 1).abs().max(),
        "seq_fraction_high": (raw_N > sampling.upper).float().mean(),
        "seq_fraction_low": (raw_N < lower).float().mean(),
    }
    return {f"{PREFIX}rollout_is_{name}": value.item() for name, value in values.items()}


def _mismatch_metrics(mismatch: Mismatch) -> dict[str, float]:
    """Return perplexities, which are means over sequences, and chi-squared divergences."""
    counts_R = mismatch.counts()
    has_tokens_N = mismatch.sum(counts_R) > 0
    if not has_tokens_N.any():
        return {}
    proximal_R = torch.where(counts_R > 0, mismatch.proximal_logp_R, 0.0)
    behaviour_R = torch.where(counts_R > 0, mismatch.behaviour_logp_R, 0.0)
    training_N = -mismatch.mean(proximal_R)[has_tokens_N]
    rollout_N = -mismatch.mean(behaviour_R)[has_tokens_N]
    difference_N = training_N - rollout_N
    square_R = raw_weights(mismatch, by_sequence=False).square()
    sum_N = mismatch.sum(mismatch.log_ratio())[has_tokens_N]
    values = {
        "training_ppl": training_N.exp().mean(),
        "training_log_ppl": training_N.mean(),
        "rollout_ppl": rollout_N.exp().mean(),
        "rollout_log_ppl": rollout_N.mean(),
        "log_ppl_diff": difference_N.mean(),
        "log_ppl_abs_diff": difference_N.abs().mean(),
        "log_ppl_diff_max": difference_N.max(),
        "log_ppl_diff_min": difference_N.min(),
        "ppl_ratio": difference_N.exp().mean(),
        "chi2_token": (square_R * counts_R).sum() / counts_R.sum() - 1,
        "chi2_seq": (2 * sum_N.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).exp().mean() - 1,
    }
    return {f"{PREFIX}{name}": value.item() for name, value in values.items()}


def _rejection_metrics(mismatch: Mismatch, rejections: tuple[Rejection, ...]) -> dict[str, float]:
    """Return the shares of rejected tokens, and of sequences with any, by option and in total."""
    masks = {f"{r.option}_": kept_tokens(mismatch, r) for r in rejections}
    masks[""] = all_kept(mismatch, rejections)
    counts_R = mismatch.counts()
    num_tokens = counts_R.sum().clamp(min=1)
    num_sequences = (mismatch.sum(counts_R) > 0).sum().clamp(min=1)
    metrics: dict[str, float] = {}
    for name, kept_R in masks.items():
        rejected_R = counts_R * ~kept_R
        touched = (mismatch.sum(rejected_R) > 0).sum()
        prefix = f"{PREFIX}rollout_rs_{name}"
        metrics[f"{prefix}masked_fraction"] = (rejected_R.sum() / num_tokens).item()
        metrics[f"{prefix}seq_masked_fraction"] = (touched / num_sequences).item()
    return metrics
