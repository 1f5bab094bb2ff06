# SPDX-License-Identifier: Apache-2.0
"""The preparation of the next batch while the current one is trained on.

The frozen models (reference and reward model) score the batch ahead of its training step. If they
share devices with the trainer, their passes fall between its passes. The old log-probs are computed
ahead only on devices other than the trainer's. In lockstep (``trainer.lockstep``) they are computed
within the step, so that the version of their weights is fixed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from tandem.metrics.activity import Phase
from tandem.pipeline.batch import Batch, lay_out
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.phases import (
    PolicyScores,
    score_with_critic,
    score_with_policy,
    score_with_reference,
)
from tandem.pipeline.reward_phase import score_with_reward_model
from tandem.types import Group

T = TypeVar("T")

_PHASES = {
    "logp": Phase.LOG_PROBS,
    "ref_logp": Phase.REFERENCE,
    "reward model": Phase.REWARD_MODEL,
    "values": Phase.VALUES,
}
"""The phase of each pass, by its name in the trace."""


async def prepare_batch(
    context: RunContext, buffer: GroupBuffer, *, version: int, in_use: Callable[[], int]
) -> Batch | None:
    """Return the batch to train the weights ``version`` on; None at the end of the data.

    Args:
        in_use: returns the version that every engine but the trainer uses.
    """
    groups = await buffer.take(version)
    if len(groups) < context.config.data.train_batch_size:
        return None
    taken_s, num_left = context.clock(), buffer.num_complete
    ahead = _scores_ahead(context)
    policy_lag = version - in_use() if ahead and context.config.needs_old_log_probs else 0
    batch = lay_out(groups, version=version)
    laid_out_s = context.clock() - taken_s
    async with asyncio.TaskGroup() as passes:
        scored = passes.create_task(_scored_groups(context, groups))
        reference = passes.create_task(_ref_log_probs(context, batch))
        policy = passes.create_task(_old_log_probs(context, batch)) if ahead else None
    unscored = PolicyScores(None, batch.sequences)
    policy_scores, policy_s = (unscored, 0.0) if policy is None else policy.result()
    ref_logp_R, reference_s = reference.result()
    scored_groups, reward_s = scored.result()
    return replace(
        batch if scored_groups is groups else lay_out(scored_groups, version=version),
        sequences=policy_scores.sequences,
        old_logp_R=policy_scores.old_logp_R,
        squares_R=policy_scores.squares_R,
        ref_logp_R=ref_logp_R,
        taken_s=taken_s,
        num_left=num_left,
        policy_lag=policy_lag,
        seconds={
            "lay_out": laid_out_s,
            "old_log_prob": policy_s,
            "ref": reference_s,
            "reward": reward_s,
        },
    )


async def finish_scoring(context: RunContext, batch: Batch) -> Batch:
    """Return the batch with the old log-probs and values that could not be computed ahead.

    Updates change the critic, so its values are never computed ahead.
    """
    if not _scores_ahead(context):
        scores, policy_s = await _old_log_probs(context, batch)
        batch = replace(
            batch,
            sequences=scores.sequences,
            old_logp_R=scores.old_logp_R,
            squares_R=scores.squares_R,
            seconds={**batch.seconds, "old_log_prob": policy_s},
        )
    if context.engines.critic is not None:
        values = score_with_critic(context, batch)
        values_R, values_s = await _timed(context, "actor-train", scores=values, name="values")
        seconds = {**batch.seconds, "values": values_s}
        batch = replace(batch, values_R=values_R, seconds=seconds)
    return batch


def _scores_ahead(context: RunContext) -> bool:
    """Return whether the old log-probs of the next batch are computed during training."""
    in_turn = context.config.trainer.lockstep
    return context.engines.scorer is not context.engines.train and not in_turn


async def _old_log_probs(context: RunContext, batch: Batch) -> tuple[PolicyScores, float]:
    if not context.config.needs_old_log_probs:
        return await score_with_policy(context, batch), 0.0
    return await _timed(context, "logp", scores=score_with_policy(context, batch))


async def _ref_log_probs(context: RunContext, batch: Batch) -> tuple[Tensor | None, float]:
    if not context.config.needs_reference:
        return None, 0.0
    return await _timed(context, "ref_logp", scores=score_with_reference(context, batch))


async def _scored_groups(
    context: RunContext, groups: Sequence[Group]
) -> tuple[Sequence[Group], float]:
    if context.engines.reward_model is None:
        return groups, 0.0
    scores = score_with_reward_model(context, groups)
    return await _timed(context, "reward", scores=scores, name="reward model")


async def _timed(
    context: RunContext, role: str, *, scores: Awaitable[T], name: str | None = None
) -> tuple[T, float]:
    """Await ``scores`` within a span of the trace; return them with the seconds they took."""
    begin_s = context.clock()
    name = name or role
    with context.trace.span(role, name), context.activity.during(_PHASES[name]):
        scored = await scores
    return scored, context.clock() - begin_s
