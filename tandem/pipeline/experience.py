# SPDX-License-Identifier: Apache-2.0
"""From scored groups to what an optimizer step consumes: log-probs that are needed, advantages,
loss columns.

Everything is flat: N sequences in the order of their groups, R response tokens in the order of
their sequences.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
from tandem.algorithms.sequences import sum_by_sequence
from tandem.config.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.pipeline.buffer import ScoredGroup
from tandem.types import Group, LossColumns, RewardStatus


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """Log-probs of the response tokens under the frozen policies, fp32 (R,); None where nothing
    reads them.
    """

    old_logp_R: Tensor | None
    ref_logp_R: Tensor | None


@dataclass(frozen=True, slots=True)
class Experience:
    """One step's worth of data, ready to be cut into mini-batches.

    Attributes:
        batch: the flat layout.
        columns: loss columns over all R response tokens.
        active_N: has a reward, and an advantage other than 0 somewhere.
        rewards_N: rewards after a KL penalty, if any.
        returns_R: what a critic would be trained on.
        mean_kl: mean KL of the sequences from the reference, 0 without KL in the reward.
    """

    batch: ScoredBatch
    columns: LossColumns
    active_N: Tensor
    rewards_N: Tensor
    returns_R: Tensor
    mean_kl: float


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """Groups laid out flat, before credit is assigned.

    A sequence is valid if its reward has a value, and with a greedy baseline (``remax``) that one
    too; ``greedy_scores_N`` is None without.
    """

    groups: Sequence[Group]
    sequences: Sequence[TrainSequence]
    sequence_R: Tensor
    group_N: Tensor
    scores_N: Tensor
    valid_N: Tensor
    rollout_logp_R: Tensor
    greedy_scores_N: Tensor | None

    def sum_tokens(self, values_R: Tensor) -> Tensor:
        """Sum over the tokens of each sequence, (N,)."""
        return sum_by_sequence(values_R, self.sequence_R, num_sequences=len(self.sequences))

    def mean_tokens(self, values_R: Tensor) -> Tensor:
        """Mean over the tokens of each sequence, 0 for an empty one, (N,)."""
        return self.sum_tokens(values_R) / self.sum_tokens(torch.ones_like(values_R)).clamp(min=1)


def as_floats(values: Tensor) -> list[float]:
    """A one-dimensional tensor as Python numbers."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def lay_out(scored: Sequence[ScoredGroup]) -> ScoredBatch:
    """Flatten groups: sequences, scores and rollout log-probs in order."""
    groups = [entry.group for entry in scored]
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    sequences = [
        TrainSequence(prompt.uid, prompt.token_ids, sample.completion.token_ids)
        for prompt, sample in samples
    ]
    lengths_N = torch.tensor([len(sample.completion.token_ids) for _, sample in samples])
    log_probs = [value for _, sample in samples for value in sample.completion.log_probs]
    has_value = [sample.reward.status is RewardStatus.VALUE for _, sample in samples]
    valid_N = torch.tensor(has_value)
    greedy_scores_N = _greedy_scores(scored)
    if greedy_scores_N is not None:
        valid_N &= ~greedy_scores_N.isnan()
    return ScoredBatch(
        groups=groups,
        sequences=sequences,
        sequence_R=torch.repeat_interleave(lengths_N),
        group_N=torch.tensor([prompt.uid for prompt, _ in samples]),
        scores_N=torch.tensor([sample.reward.score for _, sample in samples]),
        valid_N=valid_N,
        rollout_logp_R=torch.tensor(log_probs, dtype=torch.float32),
        greedy_scores_N=greedy_scores_N,
    )


def _greedy_scores(scored: Sequence[ScoredGroup]) -> Tensor | None:
    """The score of the greedy answer for each sequence, NaN if it failed, (N,)."""
    scores = [
        entry.baseline.score
        for entry in scored
        if entry.baseline is not None
        for _ in entry.group.samples
    ]
    return torch.tensor(scores) if scores else None


def assign_credit(
    batch: ScoredBatch, scores: PolicyScores, *, config: RunConfig, controller: KlController
) -> Experience:
    """Token rewards, KL in the reward, advantages."""
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
            greedy_scores_N=batch.greedy_scores_N,
        ),
        algorithm,
    )
    magnitude_N = batch.sum_tokens(advantages.advantages_R.abs())
    return Experience(
        batch=batch,
        columns=LossColumns(
            advantages_R=advantages.advantages_R,
            old_logp_R=scores.old_logp_R,
            ref_logp_R=scores.ref_logp_R,
        ),
        active_N=batch.valid_N & (magnitude_N > 0),
        rewards_N=batch.sum_tokens(token_rewards_R),
        returns_R=advantages.returns_R,
        mean_kl=mean_kl,
    )
