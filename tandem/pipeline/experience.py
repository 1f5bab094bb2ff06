# SPDX-License-Identifier: Apache-2.0
"""Credit assignment: from a batch with its log-probs to the experience that optimizer steps read.

Shapes: N sequences, R drawn tokens, L loss tokens (the R tokens without those that
``algorithm.rollout_correction.rollout_rs`` rejects).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from torch import Tensor

from tandem.algorithms.advantages import AdvantageInputs, estimate_advantages
from tandem.algorithms.kl import (
    KlController,
    estimate_kl,
    mean_sequence_kl,
    penalise_rewards,
    place_scores,
)
from tandem.config.schema.run import RunConfig
from tandem.data.packing import TrainSequence
from tandem.pipeline.batch import Batch, as_bools
from tandem.pipeline.correction import correct_batch
from tandem.types import LossColumns


@dataclass(frozen=True, slots=True)
class Experience:
    """A batch whose tokens have advantages, ready to be cut into mini-batches.

    Attributes:
        batch: the batch, whose statistics cover all R drawn tokens.
        sequences: the N sequences, whose loss masks leave out rejected tokens.
        columns: the inputs of the loss for each loss token, (L,).
        computed_N: whether a sequence goes through the model, bool. Every sequence whose reward has
            a value counts in the denominators of the loss, with all its drawn tokens.
        kept_R: whether rejection keeps a token, bool; None without rejection.
        advantages_R: the advantages, fp32.
        returns_R: the returns, which a critic learns, fp32.
        rewards_N: the rewards after the KL penalty, if there is one.
        mean_kl: the mean KL of the sequences from the reference, 0 without KL in the reward.
        correction_metrics: the metrics ``rollout_corr/*`` that are known before the update.
    """

    batch: Batch
    sequences: Sequence[TrainSequence]
    columns: LossColumns
    computed_N: Tensor
    kept_R: Tensor | None
    advantages_R: Tensor
    returns_R: Tensor
    rewards_N: Tensor
    mean_kl: float
    correction_metrics: Mapping[str, float]


def assign_credit(batch: Batch, *, config: RunConfig, controller: KlController) -> Experience:
    """Compute token rewards, KL penalties, advantages and the off-policy correction of a batch.

    Args:
        batch: a batch with the log-probs and values that ``config`` requires.
        controller: the coefficient of the KL penalty.
    """
    algorithm, num_sequences = config.algorithm, len(batch.sequences)
    token_rewards_R = place_scores(batch.scores_N, batch.sequence_R)
    mean_kl = 0.0
    if algorithm.use_kl_in_reward:
        assert batch.ref_logp_R is not None and batch.old_logp_R is not None, "KL needs log-probs"
        kl_R = estimate_kl(batch.old_logp_R, batch.ref_logp_R, kind=algorithm.kl_penalty)
        mean_kl = float(mean_sequence_kl(kl_R, batch.sequence_R, num_sequences=num_sequences))
        token_rewards_R = penalise_rewards(
            token_rewards_R, kl_R, coefficient=controller.coefficient
        )
    corrected = correct_batch(batch, config)
    weights_R = None if corrected is None else corrected.weights_R
    inputs = AdvantageInputs(
        token_rewards_R=token_rewards_R,
        sequence_R=batch.sequence_R,
        num_sequences=num_sequences,
        group_N=batch.group_N,
        valid_N=batch.valid_N,
        values_R=batch.values_R,
        greedy_scores_N=batch.greedy_scores_N,
        parts_N=batch.parts_N,
        old_logp_R=batch.old_logp_R,
        squares_R=batch.squares_R,
        weights_R=weights_R,
    )
    advantages = estimate_advantages(inputs, algorithm)
    max_lag = config.trainer.max_lag
    compares = config.compares_policies
    columns = LossColumns(
        advantages_R=advantages.advantages_R,
        old_logp_R=batch.old_logp_R,
        ref_logp_R=batch.ref_logp_R,
        weights_R=weights_R,
        rollout_logp_R=batch.rollout_logp_R if compares and corrected is None else None,
        lag_R=batch.lag_R.clamp(0, max_lag) if compares and max_lag > 0 else None,
    )
    experience = Experience(
        batch=batch,
        sequences=batch.sequences,
        columns=columns,
        computed_N=_computed(batch, advantages.advantages_R, config=config),
        kept_R=None,
        advantages_R=advantages.advantages_R,
        returns_R=advantages.returns_R,
        rewards_N=batch.sum_tokens(token_rewards_R),
        mean_kl=mean_kl,
        correction_metrics={} if corrected is None else corrected.metrics,
    )
    if corrected is None or corrected.kept_R is None:
        return experience
    return _without_rejected(experience, corrected.kept_R)


def _computed(batch: Batch, advantages_R: Tensor, *, config: RunConfig) -> Tensor:
    """Return which sequences the policy computes, bool (N,).

    Unless an entropy or KL term or the loss itself moves it, a sequence with advantage 0 has no
    gradient and is skipped. If all sequences are such, all are computed, so that there are metrics
    and divergence is detected.
    """
    actor = config.actor_rollout_ref.actor
    active_N = batch.valid_N & (batch.sum_tokens(advantages_R.abs()) > 0)
    moves_all = (
        actor.entropy_coeff != 0 or actor.use_kl_loss or actor.policy_loss.traits.computes_all
    )
    return batch.valid_N if moves_all or not active_N.any() else active_N


def _without_rejected(experience: Experience, kept_R: Tensor) -> Experience:
    """Leave out rejected tokens, and sequences that have no token left."""
    batch, flags = experience.batch, iter(as_bools(kept_R))
    sequences = [_masked(sequence, flags) for sequence in batch.sequences]
    remains_N = batch.sum_tokens(kept_R.float()) > 0
    return replace(
        experience,
        sequences=sequences,
        columns=experience.columns.map(lambda column_R: column_R[kept_R]),
        computed_N=experience.computed_N & remains_N,
        kept_R=kept_R,
    )


def _masked(sequence: TrainSequence, kept: Iterator[bool]) -> TrainSequence:
    """Return a sequence whose loss masks leave out rejected tokens.

    Args:
        kept: a flag for each loss token, those of the sequence itself before those of its branches.
    """
    mask = sequence.loss_mask
    if mask is None:
        mask = tuple(islice(kept, len(sequence.response_ids)))
    else:
        mask = tuple(carries_loss and next(kept) for carries_loss in mask)
    branches = tuple(_masked(row, kept) for row in sequence.branches)
    return replace(sequence, loss_mask=mask, branches=branches)
