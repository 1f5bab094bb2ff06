# SPDX-License-Identifier: Apache-2.0
"""From scored groups to what an optimizer step consumes: log-probs that are needed, advantages,
off-policy correction, loss columns.

Everything is flat: N sequences in the order of their groups, R response tokens in the order of
their sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.advantages import ADVANTAGES, AdvantageInputs
from tandem.algorithms.kl import (
    KlController,
    estimate_kl,
    mean_sequence_kl,
    penalise_rewards,
    place_scores,
)
from tandem.algorithms.off_policy import Mismatch
from tandem.algorithms.sequences import sum_by_sequence
from tandem.config.schema.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.pipeline.correction import CorrectedBatch, correct, correction_of
from tandem.types import Completion, Group, LossColumns, RewardStatus


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """Log-probs of the response tokens under the frozen policies, and the critic's values before
    its update, fp32 (R,); None where nothing reads them.
    """

    old_logp_R: Tensor | None
    ref_logp_R: Tensor | None
    values_R: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Experience:
    """One step's worth of data, ready to be cut into mini-batches.

    Attributes:
        batch: the flat layout.
        columns: loss columns over all R response tokens.
        active_N: has a reward, and an advantage other than 0 somewhere.
        rewards_N: rewards after a KL penalty, if any.
        returns_R: what a critic is trained on.
        values_R: the critic's before its update, None without one.
        mean_kl: mean KL of the sequences from the reference, 0 without KL in the reward.
        kept_R: tokens that rejection leaves, bool (R,); None if it was not asked for.
        correction_metrics: ``rollout_corr/*`` as far as known before the update.
    """

    batch: ScoredBatch
    columns: LossColumns
    active_N: Tensor
    rewards_N: Tensor
    returns_R: Tensor
    values_R: Tensor | None
    mean_kl: float
    kept_R: Tensor | None
    correction_metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Groups laid out flat, before credit is assigned.

    A sequence is valid if its reward has a value, and with a greedy baseline (``remax``) that one
    too; ``greedy_scores_N`` is None without. ``lag_R``, int64 (R,), counts the weights versions
    between the one that drew a token and the one that is trained on it.
    """

    groups: Sequence[Group]
    sequences: Sequence[TrainSequence]
    sequence_R: Tensor
    group_N: Tensor
    scores_N: Tensor
    valid_N: Tensor
    rollout_logp_R: Tensor
    lag_R: Tensor
    greedy_scores_N: Tensor | None

    def sum_tokens(self, values_R: Tensor) -> Tensor:
        """Sum over the tokens of each sequence, (N,)."""
        return sum_by_sequence(values_R, self.sequence_R, num_sequences=len(self.sequences))

    def mean_tokens(self, values_R: Tensor) -> Tensor:
        """Mean over the tokens of each sequence, 0 for an empty one, (N,)."""
        lengths_N = torch.tensor([len(sequence.response_ids) for sequence in self.sequences])
        return self.sum_tokens(values_R) / lengths_N.clamp(min=1)


def as_floats(values: Tensor) -> list[float]:
    """A one-dimensional tensor as Python numbers."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def as_bools(values: Tensor) -> list[bool]:
    """As ``as_floats``."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def lay_out(groups: Sequence[Group], *, version: int = 0) -> ScoredBatch:
    """Flatten groups: sequences, scores and rollout log-probs in order.

    Args:
        version: of the weights that are about to be trained.
    """
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    sequences = [
        TrainSequence(prompt.uid, prompt.token_ids, sample.completion.token_ids)
        for prompt, sample in samples
    ]
    lengths_N = torch.tensor([len(sample.completion.token_ids) for _, sample in samples])
    log_probs = [np.asarray(sample.completion.log_probs, np.float32) for _, sample in samples]
    has_value = [sample.reward.status is RewardStatus.VALUE for _, sample in samples]
    valid_N = torch.tensor(has_value)
    greedy_scores_N = _greedy_scores(groups)
    if greedy_scores_N is not None:
        valid_N &= ~greedy_scores_N.isnan()
    return ScoredBatch(
        groups=groups,
        sequences=sequences,
        sequence_R=torch.repeat_interleave(lengths_N),
        group_N=torch.tensor([prompt.uid for prompt, _ in samples]),
        scores_N=torch.tensor([sample.reward.score for _, sample in samples]),
        valid_N=valid_N,
        rollout_logp_R=torch.as_tensor(np.concatenate(log_probs)),
        lag_R=_lags([sample.completion for _, sample in samples], version),
        greedy_scores_N=greedy_scores_N,
    )


def _lags(completions: Sequence[Completion], version: int) -> Tensor:
    """``version`` minus the version of each token, int64 (R,)."""
    runs = [run for completion in completions for run in completion.version_runs]
    lags = np.array([version - drawn for drawn, _ in runs], dtype=np.int64)
    return torch.as_tensor(np.repeat(lags, [count for _, count in runs]))


def _greedy_scores(groups: Sequence[Group]) -> Tensor | None:
    """The score of the greedy answer for each sequence, NaN if it failed, (N,)."""
    scores = [
        group.baseline.reward.score
        for group in groups
        if group.baseline is not None
        for _ in group.samples
    ]
    return torch.tensor(scores) if scores else None


def assign_credit(
    batch: ScoredBatch, scores: PolicyScores, *, config: RunConfig, controller: KlController
) -> Experience:
    """Token rewards, KL in the reward, advantages, off-policy correction."""
    algorithm = config.algorithm
    num_sequences = len(batch.sequences)
    token_rewards_R = place_scores(batch.scores_N, batch.sequence_R)
    mean_kl = 0.0
    if algorithm.use_kl_in_reward:
        assert scores.ref_logp_R is not None and scores.old_logp_R is not None, "KL needs log-probs"
        kl_R = estimate_kl(scores.old_logp_R, scores.ref_logp_R, kind=algorithm.kl_penalty)
        mean_kl = float(mean_sequence_kl(kl_R, batch.sequence_R, num_sequences=num_sequences))
        token_rewards_R = penalise_rewards(
            token_rewards_R, kl_R, coefficient=controller.coefficient
        )
    advantages = ADVANTAGES[algorithm.adv_estimator](
        AdvantageInputs(
            token_rewards_R=token_rewards_R,
            sequence_R=batch.sequence_R,
            num_sequences=num_sequences,
            group_N=batch.group_N,
            valid_N=batch.valid_N,
            values_R=scores.values_R,
            greedy_scores_N=batch.greedy_scores_N,
        ),
        algorithm,
    )
    magnitude_N = batch.sum_tokens(advantages.advantages_R.abs())
    corrected = _correct(batch, scores, config=config)
    columns = LossColumns(
        advantages_R=advantages.advantages_R,
        old_logp_R=scores.old_logp_R,
        ref_logp_R=scores.ref_logp_R,
    )
    return Experience(
        batch=batch,
        columns=_with_correction(columns, batch, config=config, corrected=corrected),
        active_N=batch.valid_N & (magnitude_N > 0),
        rewards_N=batch.sum_tokens(token_rewards_R),
        returns_R=advantages.returns_R,
        values_R=scores.values_R,
        mean_kl=mean_kl,
        kept_R=None if corrected is None else corrected.kept_R,
        correction_metrics={} if corrected is None else corrected.metrics,
    )


def _correct(
    batch: ScoredBatch, scores: PolicyScores, *, config: RunConfig
) -> CorrectedBatch | None:
    """None where nothing is compared, or the loss does it."""
    correction = correction_of(config)
    keys = config.algorithm.rollout_correction
    if correction is None or keys.bypass_mode or scores.old_logp_R is None:
        return None
    mismatch = Mismatch(
        scores.old_logp_R,
        batch.rollout_logp_R,
        batch.sequence_R,
        len(batch.sequences),
        counted_R=batch.valid_N[batch.sequence_R],
    )
    max_lag = config.trainer.max_lag
    return correct(
        mismatch,
        correction,
        normalizes=keys.rollout_is_batch_normalize,
        lag_R=batch.lag_R.clamp(0, max_lag),
        num_lags=max_lag + 1,
    )


def _with_correction(
    columns: LossColumns,
    batch: ScoredBatch,
    *,
    config: RunConfig,
    corrected: CorrectedBatch | None,
) -> LossColumns:
    if not config.compares_policies:
        return columns
    max_lag = config.trainer.max_lag
    return replace(
        columns,
        weights_R=None if corrected is None else corrected.weights_R,
        rollout_logp_R=batch.rollout_logp_R if corrected is None else None,
        lag_R=batch.lag_R.clamp(0, max_lag) if max_lag > 0 else None,
    )
