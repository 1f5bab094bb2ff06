# SPDX-License-Identifier: Apache-2.0
"""The training half of a step: score the batch with frozen weights, then the optimizer steps.

Mini-batches are cut from the batch in order (verl's meaning: ``ppo_mini_batch_size`` prompts each,
``ppo_epochs`` times over). Micro-batches only bound memory; loss, gradient and metrics do not
depend on them. A sequence that cannot move the loss (no reward, or advantage 0 while there is
neither entropy nor KL term) is not computed, but still counts in the denominators, so that the
gradient is the same. What rejection leaves out (``rollout_correction.rollout_rs``) does not count.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from tandem.algorithms.off_policy import lag_metrics
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.api import ReferencePolicy
from tandem.config.run import RunConfig
from tandem.data.balance import batch_cost, deal, seqlen_metrics
from tandem.data.packing import Plan, TrainSequence, in_sequence_order, pack_microbatches
from tandem.pipeline.correction import correction_of
from tandem.pipeline.experience import Experience, ScoredBatch, as_bools
from tandem.pipeline.microbatches import MicrobatchLimits
from tandem.pipeline.parts import PipelineParts
from tandem.types import LossColumns, LossScale, UpdateReport

MEANS_OVER_COMPUTED_TOKENS = ("actor/entropy", "actor/ppo_kl")
"""Metrics that skipped sequences would have contributed to: they are means over computed tokens."""

COMPUTED_SHARE = "actor/computed_sequences/share"
"""Of the sequences with a reward, those that went through the model: what those means cover."""

ZERO_WITHOUT_SEQUENCES: tuple[str, ...] = ("actor/loss", "actor/pg_loss", "actor/pg_clipfrac")
"""What a mini-batch contributes to means over mini-batches if all its sequences were skipped."""


@dataclass(frozen=True, slots=True)
class TrainingRows:
    """What of a batch is trained on.

    Attributes:
        sequences: all N, with masks where tokens were rejected.
        columns: over their loss tokens.
        counted_N: part of the denominators.
        computed_N: goes through the model.
    """

    sequences: Sequence[TrainSequence]
    columns: LossColumns
    counted_N: Tensor
    computed_N: Tensor


async def score_with_policy(parts: PipelineParts, batch: ScoredBatch) -> Tensor | None:
    """``old_log_probs``: from the current weights, from the rollout (bypass), or None when not
    needed.
    """
    config = parts.config
    if config.algorithm.rollout_correction.bypass_mode:
        return batch.rollout_logp_R
    if not config.needs_old_log_probs:
        return None
    return await _log_probs(
        parts,
        parts.engines.scorer,
        sequences=batch.sequences,
        limits=_scoring_limits(parts, "rollout"),
    )


async def score_with_reference(parts: PipelineParts, batch: ScoredBatch) -> Tensor | None:
    """``ref_log_prob``, or None when nothing reads it."""
    reference = parts.engines.reference
    if reference is None or not parts.config.needs_reference:
        return None
    return await _log_probs(
        parts, reference, sequences=batch.sequences, limits=_scoring_limits(parts, "ref")
    )


async def update_policy(parts: PipelineParts, experience: Experience) -> list[UpdateReport]:
    """All optimizer steps on one batch, in order."""
    config = parts.config
    actor = config.actor_rollout_ref.actor
    loss = policy_loss(config)
    rows = training_rows(config, experience)
    size = actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    num_sequences = len(experience.batch.sequences)
    reports: list[UpdateReport] = []
    for epoch in range(actor.ppo_epochs):
        order = _sequence_order(config, num_sequences, epoch=epoch)
        for start in range(0, num_sequences, size):
            chosen = order[start : start + size]
            reports.append(await _optimizer_step(parts, rows, chosen=chosen, loss=loss))
    await parts.runtime.call(parts.engines.train.advance_schedule)
    return reports


def policy_loss(config: RunConfig) -> PolicyLoss:
    """The actor's loss as the config describes it."""
    actor = config.actor_rollout_ref.actor
    correction = config.algorithm.rollout_correction
    reinforces = correction.bypass_mode and correction.loss_type == "reinforce"
    return PolicyLoss(
        loss_mode="gpg" if reinforces else actor.policy_loss.loss_mode,
        clip_ratio_low=actor.clip_low,
        clip_ratio_high=actor.clip_high,
        clip_ratio_c=actor.clip_ratio_c,
        loss_agg_mode=actor.loss_agg_mode,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        entropy_coeff=actor.entropy_coeff,
        calculate_entropy=True,
        use_kl_loss=actor.use_kl_loss,
        kl_loss_coef=actor.kl_loss_coef,
        kl_loss_type=actor.kl_loss_type,
        correction=correction_of(config),
        max_lag=config.trainer.max_lag,
    )


def training_rows(config: RunConfig, experience: Experience) -> TrainingRows:
    """The batch without its rejected tokens and without sequences that none are left of."""
    batch, columns, kept_R = experience.batch, experience.columns, experience.kept_R
    computed_N = _computed(config, experience)
    if kept_R is None:
        return TrainingRows(batch.sequences, columns, batch.valid_N, computed_N)
    lengths = [len(sequence.response_ids) for sequence in batch.sequences]
    flags = iter(as_bools(kept_R))
    masks = [tuple(islice(flags, length)) for length in lengths]
    remains_N = batch.sum_tokens(kept_R.float()) > 0
    return TrainingRows(
        [replace(row, loss_mask=mask) for row, mask in zip(batch.sequences, masks, strict=True)],
        columns.map(lambda column_R: column_R[kept_R]),
        batch.valid_N & remains_N,
        computed_N & remains_N,
    )


async def _optimizer_step(
    parts: PipelineParts, rows: TrainingRows, *, chosen: Sequence[int], loss: PolicyLoss
) -> UpdateReport:
    sequences = rows.sequences
    valid = [i for i in chosen if rows.counted_N[i]]
    computed = [i for i in chosen if rows.computed_N[i]]
    num_tokens = sum(sequences[i].num_loss_tokens for i in valid)
    scale = LossScale(num_tokens=max(num_tokens, 1), num_sequences=max(len(valid), 1))
    temperature = parts.config.actor_rollout_ref.rollout.temperature

    async def update(plan: Plan) -> UpdateReport:
        members = [[computed[i] for i in microbatch] for microbatch in plan]
        batches = pack_microbatches(sequences, members, columns=rows.columns)
        report: UpdateReport = await parts.runtime.call(
            parts.engines.train.update, batches, loss, scale=scale, temperature=temperature
        )
        costs = [batch_cost(batch) for batch in batches]
        dealt = deal(costs, parts.engines.train.data_parallel_size)
        shares = [[i for number in mine for i in plan[number]] for mine in dealt]
        lengths = [len(sequences[i].prompt_ids) + len(sequences[i].response_ids) for i in computed]
        return replace(report, metrics={**report.metrics, **seqlen_metrics(lengths, shares)})

    report = await parts.memory.run(
        update, [sequences[i] for i in computed], limits=_update_limits(parts)
    )
    share = {COMPUTED_SHARE: len(computed) / max(len(valid), 1)}
    if not computed:
        return replace(report, metrics=dict.fromkeys(ZERO_WITHOUT_SEQUENCES, 0.0) | share)
    num_computed = sum(sequences[i].num_loss_tokens for i in computed)
    factor = scale.num_tokens / max(num_computed, 1)
    return replace(report, metrics=lag_metrics(_rescaled(report.metrics, factor)) | share)


def _rescaled(metrics: Mapping[str, float], factor: float) -> dict[str, float]:
    return {
        name: value * factor if name in MEANS_OVER_COMPUTED_TOKENS else value
        for name, value in metrics.items()
    }


def _computed(config: RunConfig, experience: Experience) -> Tensor:
    """Which sequences go through the model; all, if else there were none to measure the policy by
    (and to find out that it has diverged).
    """
    actor = config.actor_rollout_ref.actor
    has_other_terms = actor.entropy_coeff != 0 or actor.use_kl_loss
    needs_all = has_other_terms or not experience.active_N.any()
    return experience.batch.valid_N if needs_all else experience.active_N


def _sequence_order(config: RunConfig, num_sequences: int, *, epoch: int) -> list[int]:
    """The order mini-batches are cut in: that of the batch, or with ``actor.shuffle`` a seeded one
    a epoch.
    """
    if not config.actor_rollout_ref.actor.shuffle:
        return list(range(num_sequences))
    generator = torch.Generator().manual_seed(
        config.actor_rollout_ref.actor.data_loader_seed + epoch
    )
    return [int(i) for i in torch.randperm(num_sequences, generator=generator)]


async def _log_probs(
    parts: PipelineParts,
    engine: ReferencePolicy,
    *,
    sequences: Sequence[TrainSequence],
    limits: MicrobatchLimits,
) -> Tensor:
    """Log-probs of all response tokens in the order of the sequences, fp32 (R,)."""
    temperature = parts.config.actor_rollout_ref.rollout.temperature

    async def score(plan: Plan) -> Tensor:
        batches = pack_microbatches(sequences, plan)
        columns = await parts.runtime.call(engine.log_probs, batches, temperature)
        return in_sequence_order(columns, sequences=sequences, plan=plan)

    return await parts.memory.run(score, sequences, limits=limits.on(engine))


def _update_limits(parts: PipelineParts) -> MicrobatchLimits:
    actor = parts.config.actor_rollout_ref.actor
    return MicrobatchLimits(
        key="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        max_sequences=actor.ppo_micro_batch_size_per_gpu,
        max_tokens=actor.microbatch_tokens,
        preferred_tokens=None if actor.use_dynamic_bsz else parts.preferred_tokens,
        by_cost=parts.config.trainer.balance_batch,
    ).on(parts.engines.train)


def _scoring_limits(parts: PipelineParts, role: str) -> MicrobatchLimits:
    """Limits of a forward pass: ``rollout`` for old log-probs, ``ref`` for the reference."""
    roles = parts.config.actor_rollout_ref
    part = roles.rollout if role == "rollout" else roles.ref
    return MicrobatchLimits(
        key=f"actor_rollout_ref.{role}.log_prob_max_token_len_per_gpu",
        max_sequences=part.log_prob_micro_batch_size_per_gpu,
        max_tokens=part.microbatch_tokens,
        preferred_tokens=None if part.log_prob_use_dynamic_bsz else parts.preferred_tokens,
        by_cost=parts.config.trainer.balance_batch,
    )
