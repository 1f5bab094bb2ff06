# SPDX-License-Identifier: Apache-2.0
"""The phases of a training step that compute the policy, the reference and the critic.

Each model first scores the batch, then the models in training take optimizer steps on it. The
policy leaves out sequences that cannot move its loss (no reward, or advantage 0 if no other term
moves them); they still count in the denominators, so that the gradient is the same. The critic
computes every sequence whose reward has a value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import Tensor

from tandem.algorithms.off_policy import metrics_by_lag
from tandem.algorithms.policy_loss import PolicyLoss
from tandem.algorithms.value_loss import ValueLoss
from tandem.config.derived.microbatches import CRITIC_VALUES
from tandem.config.derived.pools import CRITIC
from tandem.config.schema.run import RunConfig
from tandem.data.balance import seqlen_metrics
from tandem.data.packing import TrainSequence
from tandem.pipeline.batch import Batch
from tandem.pipeline.context import RunContext
from tandem.pipeline.correction import correction_of
from tandem.pipeline.experience import Experience
from tandem.pipeline.optimizer_steps import (
    OptimizerStep,
    limits_of,
    score_and_route,
    score_sequences,
    take_steps,
)
from tandem.pipeline.replay import sequences_to_replay, without_routes
from tandem.pipeline.survey import survey
from tandem.types import LossColumns, UpdateReport

MEANS_OVER_COMPUTED_TOKENS = (
    "actor/entropy",
    "actor/experts/max_over_mean",
    "actor/ppo_kl",
    "actor/router/replay_overlap",
    "critic/vf_clipfrac",
    "critic/vpred_mean",
)
"""The metrics to which skipped or rejected tokens would have contributed: means over the others."""

COMPUTED_SHARE = "actor/computed_sequences/share"
"""The share of the sequences with a reward that the model computed; those means cover them."""

ZERO_WITHOUT_SEQUENCES: tuple[str, ...] = ("actor/loss", "actor/pg_loss", "actor/pg_clipfrac")
"""The metrics that are 0 if every sequence of a mini-batch was skipped."""


@dataclass(frozen=True, slots=True)
class PolicyScores:
    """The scores of a batch under the policy before its update, fp32 (R,); None if nothing reads
    them.

    Attributes:
        old_logp_R: the log-probs. With ``bypass_mode`` they are those of the rollout.
        squares_R: the sums of squared probabilities.
        sequences: the sequences of the batch, with the experts that computed them in this pass if
            those are replayed.
    """

    old_logp_R: Tensor | None
    sequences: Sequence[TrainSequence]
    squares_R: Tensor | None = None


async def score_with_policy(context: RunContext, batch: Batch) -> PolicyScores:
    """Return the scores of the policy before its update.

    Raises:
        UserError: see ``sequences_to_replay``.
    """
    config = context.config
    sequences = sequences_to_replay(config, batch)
    if config.algorithm.rollout_correction.bypass_mode:
        return PolicyScores(batch.rollout_logp_R, sequences)
    if not config.needs_old_log_probs:
        return PolicyScores(None, sequences)
    with_squares = config.algorithm.estimator.needs_squares
    scored = await score_and_route(
        context,
        context.engines.scorer,
        sequences=sequences,
        limits=limits_of(context, "logp"),
        temperature=config.actor_rollout_ref.rollout.temperature,
        with_squares=with_squares,
        with_routes=config.replays_old_log_probs,
    )
    if not with_squares:
        return PolicyScores(scored.score_R, scored.sequences)
    old_logp_R, squares_R = scored.score_R.unbind(1)
    return PolicyScores(old_logp_R, scored.sequences, squares_R)


async def score_with_reference(context: RunContext, batch: Batch) -> Tensor | None:
    """Return the log-probs under the reference, fp32 (R,); None if nothing reads them."""
    reference = context.engines.reference
    if reference is None or not context.config.needs_reference:
        return None
    return await score_sequences(
        context,
        reference,
        sequences=without_routes(batch.sequences),
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
    limits, loss = limits_of(context, "actor-train"), policy_loss(config)

    steps = await take_steps(
        context,
        experience,
        engine=context.engines.train,
        loss=loss,
        limits=limits,
        settings=actor,
        temperature=config.actor_rollout_ref.rollout.temperature,
        survey=partial(survey, context, loss=loss) if config.surveys_mini_batches else None,
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
    return [
        replace(step.report, metrics=_rescaled(step.report.metrics, step.rescale)) for step in steps
    ]


def policy_loss(config: RunConfig) -> PolicyLoss:
    """Return the configured loss of the policy."""
    actor = config.actor_rollout_ref.actor
    reinforces = config.algorithm.rollout_correction.reinforces
    return PolicyLoss(
        loss_mode="gpg" if reinforces else actor.policy_loss.loss_mode,
        settings=actor,
        loss_scale_factor=actor.loss_scale_factor or config.data.max_response_length,
        calculate_entropy=True,
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
    """Return the experience with the critic's columns, and all sequences computed that have a
    reward and a token that is not rejected.
    """
    batch, kept_R = experience.batch, experience.kept_R
    assert batch.values_R is not None, "the critic has scored the batch"
    columns = LossColumns(
        advantages_R=experience.advantages_R,
        values_R=batch.values_R,
        returns_R=experience.returns_R,
    )
    computed_N = batch.valid_N
    if kept_R is not None:
        columns = columns.map(lambda column_R: column_R[kept_R])
        computed_N = computed_N & (batch.sum_tokens(kept_R.float()) > 0)
    return replace(experience, columns=columns, computed_N=computed_N)


def _report(step: OptimizerStep) -> UpdateReport:
    """Return the report of a step with metrics of the sequences that it computed and skipped."""
    num_computed = len(step.lengths)
    share = {COMPUTED_SHARE: num_computed / max(step.num_counted, 1)}
    if not num_computed:
        return replace(step.report, metrics=dict.fromkeys(ZERO_WITHOUT_SEQUENCES, 0.0) | share)
    metrics = {**step.report.metrics, **seqlen_metrics(step.lengths, step.shares)}
    return replace(step.report, metrics=metrics_by_lag(_rescaled(metrics, step.rescale)) | share)


def _rescaled(metrics: Mapping[str, float], factor: float) -> dict[str, float]:
    return {
        name: value * factor if name in MEANS_OVER_COMPUTED_TOKENS else value
        for name, value in metrics.items()
    }
