# SPDX-License-Identifier: Apache-2.0
"""The batch of one training step, laid out flat without padding.

Shapes: N sequences in the order of their groups, R drawn tokens in the order of their sequences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from tandem.algorithms.sequences import sum_by_sequence
from tandem.data.packing import TrainSequence
from tandem.data.routes import routes_of
from tandem.data.span_tree import rows_of
from tandem.types import Completion, Group, Prompt, RewardOutcome, RewardStatus, Trajectory


@dataclass(frozen=True, slots=True)
class Batch:
    """The scored groups of one training step and the log-probs and values of their tokens.

    Attributes:
        groups: the groups.
        sequences: the N sequences, one for each sample, with its branches if it forked.
        sequence_R: the sequence of each token, int64, ascending.
        group_N: the uid of each sequence's prompt, int64.
        scores_N: the scores as the reward gave them, fp32, NaN without a value.
        valid_N: whether a sequence's reward has a value, bool; with a greedy baseline (``remax``)
            the baseline's reward must have one too.
        greedy_scores_N: the scores of the greedy baselines, fp32, NaN for a failed one; None
            without baselines.
        parts_N: the numbers that the reward gave beside the score, by name, fp32, NaN where a
            sample has none of that name. ``score`` is the score before any shaping.
        rollout_logp_R: the log-probs under the policy that drew the tokens, fp32.
        lag_R: the number of weights versions between the one that drew a token and the one that is
            trained on it, int64.
        old_logp_R: the log-probs under the policy before its update, fp32; None before they are
            computed, and if nothing reads them. The same holds for the next three.
        squares_R: the sums of squared probabilities of that policy at each token.
        ref_logp_R: the log-probs under the reference, fp32.
        values_R: the critic's values before its update, fp32.
        taken_s: when the batch was formed, in seconds by the clock of the run.
        num_left: the number of complete groups that were left for later batches.
        policy_lag: the number of versions by which the weights that computed ``old_logp_R`` lag
            behind the weights in training.
        seconds: the duration of laying the groups out (``lay_out``), and of each scoring pass, by
            the name of its timer.
    """

    groups: Sequence[Group]
    sequences: Sequence[TrainSequence]
    sequence_R: Tensor
    group_N: Tensor
    scores_N: Tensor
    valid_N: Tensor
    greedy_scores_N: Tensor | None
    parts_N: Mapping[str, Tensor]
    rollout_logp_R: Tensor
    lag_R: Tensor
    old_logp_R: Tensor | None = None
    squares_R: Tensor | None = None
    ref_logp_R: Tensor | None = None
    values_R: Tensor | None = None
    taken_s: float = 0.0
    num_left: int = 0
    policy_lag: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def generated_s(self) -> float:
        """The time when the last group was generated, in seconds by the clock of the run."""
        return max(group.generated_s for group in self.groups)

    def sum_tokens(self, values_R: Tensor) -> Tensor:
        """Return the sum over the tokens of each sequence, (N,)."""
        return sum_by_sequence(values_R, self.sequence_R, num_sequences=len(self.sequences))

    def mean_tokens(self, values_R: Tensor) -> Tensor:
        """Return the mean over the tokens of each sequence, 0 for an empty one, (N,)."""
        lengths_N = torch.tensor([sequence.num_loss_tokens for sequence in self.sequences])
        return self.sum_tokens(values_R) / lengths_N.clamp(min=1)


def lay_out(groups: Sequence[Group], *, version: int = 0) -> Batch:
    """Lay groups out flat, in order.

    Args:
        version: the version of the weights that are about to be trained.
    """
    samples = [(group.prompt, sample) for group in groups for sample in group.samples]
    rows_N = [rows_of(sample.trajectory) for _, sample in samples]
    sequences = [
        _sequence_of_rows(prompt, rows) for (prompt, _), rows in zip(samples, rows_N, strict=True)
    ]
    completions = [drawn for rows in rows_N for row in rows for drawn in row.completions]
    lengths_N = torch.tensor([sequence.num_loss_tokens for sequence in sequences])
    log_probs = [np.asarray(completion.log_probs, np.float32) for completion in completions]
    has_value = [sample.reward.status is RewardStatus.VALUE for _, sample in samples]
    valid_N = torch.tensor(has_value)
    greedy_scores_N = _greedy_scores(groups)
    if greedy_scores_N is not None:
        valid_N &= ~greedy_scores_N.isnan()
    return Batch(
        groups=groups,
        sequences=sequences,
        sequence_R=torch.repeat_interleave(lengths_N),
        group_N=torch.tensor([prompt.uid for prompt, _ in samples]),
        scores_N=torch.tensor([sample.reward.score for _, sample in samples]),
        valid_N=valid_N,
        greedy_scores_N=greedy_scores_N,
        parts_N=_parts([sample.reward for _, sample in samples]),
        rollout_logp_R=torch.as_tensor(np.concatenate(log_probs)),
        lag_R=_lags(completions, version),
    )


def sequence_of(prompt: Prompt, trajectory: Trajectory) -> TrainSequence:
    """Return the sequence of a trajectory; its drawn tokens carry loss.

    Trajectories that begin with the tokens of ``prompt`` share its key, so that the prompt is
    computed once. A trajectory whose prompt an environment has changed has a key of its own, and so
    has each branch of a conversation that forked.
    """
    return _sequence_of_rows(prompt, rows_of(trajectory))


def _sequence_of_rows(prompt: Prompt, rows: Sequence[Trajectory]) -> TrainSequence:
    first, *others = rows
    prompt_ids = first.prompt_ids
    shares = prompt_ids is prompt.token_ids or tuple(prompt_ids) == prompt.token_ids
    key = prompt.uid if shares else -1 - first.sample_id
    branches = [
        TrainSequence(_branch_key(row, number), row.prompt_ids, row.response_ids, row.loss_mask)
        for number, row in enumerate(others, start=1)
    ]
    return TrainSequence(
        key,
        prompt_ids,
        first.response_ids,
        first.loss_mask,
        tuple(branches),
        pictures=prompt.pictures,
        routes=routes_of(first),
    )


def _branch_key(row: Trajectory, number: int) -> int:
    """Return a key that no other row has; sample ids are below 2^62."""
    return -1 - row.sample_id - (number << 62)


def _lags(completions: Sequence[Completion], version: int) -> Tensor:
    runs = [run for completion in completions for run in completion.version_runs]
    lags = np.array([version - drawn for drawn, _ in runs], dtype=np.int64)
    return torch.as_tensor(np.repeat(lags, [count for _, count in runs]))


def _greedy_scores(groups: Sequence[Group]) -> Tensor | None:
    scores = [
        group.baseline.reward.score
        for group in groups
        if group.baseline is not None
        for _ in group.samples
    ]
    return torch.tensor(scores) if scores else None


def _parts(rewards: Sequence[RewardOutcome]) -> dict[str, Tensor]:
    numbers = [{"score": reward.score, **reward.extra} for reward in rewards]
    names = dict.fromkeys(chain.from_iterable(numbers))
    return {name: torch.tensor([row.get(name, math.nan) for row in numbers]) for name in names}


def as_floats(values: Tensor) -> list[float]:
    """Return a one-dimensional tensor as Python numbers."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def as_bools(values: Tensor) -> list[bool]:
    """Return a one-dimensional bool tensor as Python values."""
    return values.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
