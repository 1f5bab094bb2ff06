# SPDX-License-Identifier: Apache-2.0
"""The phases of a training step that compute the policy, the reference and the critic.

Each model first scores the batch, then the models in training take optimizer steps on it. The
policy leaves out sequences that cannot move its loss (no reward, or advantage 0 without entropy and
KL term); they still count in the denominators, so that the gradient is the same. The critic
computes every sequence whose reward has a value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from tandem.algorithms.off_policy import figures_by_lag
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.value_loss import ValueLoss
from tandem.config.derived.microbatches import CRITIC_VALUES
from tandem.config.derived.pools import CRITIC
from tandem.config.schema.run import RunConfig
from tandem.data.balance import seqlen_metrics
from tandem.pipeline.batch import Batch
from tandem.pipeline.context import RunContext
from tandem.pipeline.correction import correction_of
from tandem.pipeline.experience import Experience
from tandem.pipeline.optimizer_steps import OptimizerStep, limits_of, score_sequences, take_steps
from tandem.types import LossColumns, UpdateReport

MEANS_OVER_COMPUTED_TOKENS = ("actor/entropy", "actor/ppo_kl")
"""The metrics to which skipped sequences would have contributed: means over computed tokens."""

COMPUTED_SHARE = "actor/computed_sequences/share"
"""The share of the sequences with a reward that the model computed; those means cover them."""

ZERO_WITHOUT_SEQUENCES: tuple[str, ...] = ("actor/loss", "actor/pg_loss", "actor/pg_clipfrac")
"""The metrics that are 0 if every sequence of a mini-batch was skipped."""


async def score_with_policy(context: RunContext, batch: Batch) -> Tensor | None:
    """Return the old log-probs, fp32 (R,); None if nothing reads them.

    With ``bypass_mode`` they are the log-probs of the rollout.
    """
    config = context.config
    if config.algorithm.rollout_correction.bypass_mode:
        return batch.rollout_logp_R
    if not config.needs_old_log_probs:
        return None
    return await score_sequences(
        context,
        context.engines.scorer,
        sequences=batch.sequences,
        limits=limits_of(context, "logp"),
        temperature=config.actor_rollout_ref.rollout.temperature,
    )


async def score_with_reference(context: RunContext, batch: Batch) -> Tensor | None:
    """Return the log-probs under the reference, fp32 (R,); None if nothing reads them."""
    reference = context.engines.reference
    if reference is None or not context.config.needs_reference:
        return None
    return await score_sequences(
        context,
        reference,
        sequences=batch.sequences,
        limits=limits_of(context, "ref_logp"),
        temperature=context.config.actor_rollout_ref.rollout.temperature,
    )


async def score_with_critic(context: RunContext, batch: Batch) -> Tensor | None:
    """Return the critic's values, fp32 (R,); None without a critic."""
    critic = context.engines.critic
    if critic is None:
        return None
    limits = limits_of(context, CRITIC_VALUES)
    return await score_sequences(context, critic, sequences=batch.sequences, limits=limits)


async def update_policy(context: RunContext, experience: Experience) -> list[UpdateReport]:
    """Take the policy's optimizer steps on one batch, in order."""
    config = context.config
    actor = config.actor_rollout_ref.actor
    limits = limits_of(context, "actor-train")
    steps = await take_steps(
        context,
        experience,
        engine=context.engines.train,
        loss=policy_loss(config),
        limits=limits,
        settings=actor,
        temperature=config.actor_rollout_ref.rollout.temperature,
    )
    return [_report(step) for step in steps]


async def update_critic(context: RunContext, experience: Experience) -> list[UpdateReport]:
    """Take the critic's optimizer steps on one batch, in order."""
    critic, config = context.engines.critic, context.config.critic
    limits = limits_of(context, CRITIC)
    assert critic is not None, "the run has a critic"
    steps = await take_steps(
        context,
        _for_critic(experience),
        engine=critic,
        loss=value_loss(context.config),
        limits=limits,
        settings=config,
    )
    return [step.report for step in steps]


def policy_loss(config: RunConfig) -> PolicyLoss:
    """Return the configured loss of the policy."""
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


def value_loss(config: RunConfig) -> ValueLoss:
    """Return the configured loss of the critic."""
    critic = config.critic
    return ValueLoss(
        cliprange_value=critic.cliprange_value,
        loss_agg_mode=critic.loss_agg_mode,
        loss_scale_factor=critic.loss_scale_factor or config.data.max_response_length,
    )


def _for_critic(experience: Experience) -> Experience:
    """Return the experience with the critic's columns and all counted sequences computed."""
    assert experience.batch.values_R is not None, "the critic has scored the batch"
    kept_R = experience.kept_R
    columns = LossColumns(
        advantages_R=experience.advantages_R,
        values_R=experience.batch.values_R,
        returns_R=experience.returns_R,
    )
    if kept_R is not None:
        columns = columns.map(lambda column_R: column_R[kept_R])
    return replace(experience, columns=columns, computed_N=experience.counted_N)


def _report(step: OptimizerStep) -> UpdateReport:
    """Return the report of a step with metrics of the sequences that it computed and skipped."""
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
