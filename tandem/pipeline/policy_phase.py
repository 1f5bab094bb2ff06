# SPDX-License-Identifier: Apache-2.0
"""The policy's part of a step: score the batch with frozen weights, then its optimizer steps.

A sequence that cannot move the loss (no reward, or advantage 0 while there is neither entropy nor
KL term) is not computed, but still counts in the denominators, so that the gradient is the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from tandem.algorithms.off_policy import figures_by_lag
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.config.schema.run import RunConfig
from tandem.data.balance import seqlen_metrics
from tandem.pipeline.context import RunContext
from tandem.pipeline.correction import correction_of
from tandem.pipeline.experience import Experience, ScoredBatch
from tandem.pipeline.microbatches import MicrobatchLimits
from tandem.pipeline.optimizer_steps import (
    OptimizerStep,
    TrainingRows,
    Updates,
    rows_to_train,
    score_sequences,
    take_steps,
)
from tandem.types import UpdateReport

MEANS_OVER_COMPUTED_TOKENS = ("actor/entropy", "actor/ppo_kl")
"""Metrics that skipped sequences would have contributed to: they are means over computed tokens."""

COMPUTED_SHARE = "actor/computed_sequences/share"
"""Of the sequences with a reward, those that went through the model: what those means cover."""

ZERO_WITHOUT_SEQUENCES: tuple[str, ...] = ("actor/loss", "actor/pg_loss", "actor/pg_clipfrac")
"""What a mini-batch contributes to means over mini-batches if all its sequences were skipped."""


async def score_with_policy(parts: RunContext, batch: ScoredBatch) -> Tensor | None:
    """``old_log_probs``: from the current weights, from the rollout (bypass), or None when not
    needed.
    """
    config = parts.config
    if config.algorithm.rollout_correction.bypass_mode:
        return batch.rollout_logp_R
    if not config.needs_old_log_probs:
        return None
    return await score_sequences(
        parts,
        parts.engines.scorer,
        sequences=batch.sequences,
        limits=_scoring_limits(parts, "rollout"),
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


async def score_with_reference(parts: RunContext, batch: ScoredBatch) -> Tensor | None:
    """``ref_log_prob``, or None when nothing reads it."""
    reference = parts.engines.reference
    if reference is None or not parts.config.needs_reference:
        return None
    return await score_sequences(
        parts,
        reference,
        sequences=batch.sequences,
        limits=_scoring_limits(parts, "ref"),
        temperature=parts.config.actor_rollout_ref.rollout.temperature,
    )


async def update_policy(parts: RunContext, experience: Experience) -> list[UpdateReport]:
    """All optimizer steps on one batch, in order."""
    config = parts.config
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    updates = Updates(
        parts.engines.train,
        policy_loss(config),
        _update_limits(parts),
        temperature=rollout.temperature,
        size=actor.ppo_mini_batch_size * rollout.n,
        num_epochs=actor.ppo_epochs,
        shuffle_seed=actor.data_loader_seed if actor.shuffle else None,
    )
    steps = await take_steps(parts, training_rows(config, experience), updates=updates)
    return [_report(step) for step in steps]


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
    return rows_to_train(experience, experience.columns, computed_N=_computed(config, experience))


def _report(step: OptimizerStep) -> UpdateReport:
    """With metrics of what was computed and what was not."""
    num_computed = len(step.lengths)
    share = {COMPUTED_SHARE: num_computed / max(step.num_counted, 1)}
    if not num_computed:
        return replace(step.report, metrics=dict.fromkeys(ZERO_WITHOUT_SEQUENCES, 0.0) | share)
    metrics = {**step.report.metrics, **seqlen_metrics(step.lengths, step.shares)}
    return replace(step.report, metrics=figures_by_lag(_rescaled(metrics, step.rescale)) | share)


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


def _update_limits(parts: RunContext) -> MicrobatchLimits:
    actor = parts.config.actor_rollout_ref.actor
    return MicrobatchLimits(
        key="actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
        max_sequences=actor.ppo_micro_batch_size_per_gpu,
        max_tokens=actor.microbatch_tokens,
        preferred_tokens=None if actor.use_dynamic_bsz else parts.preferred_tokens,
        by_cost=parts.config.trainer.balance_batch,
    )


def _scoring_limits(parts: RunContext, role: str) -> MicrobatchLimits:
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
