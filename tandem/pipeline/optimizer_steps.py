# SPDX-License-Identifier: Apache-2.0
"""Passes of one model over a batch: forward passes that score it, and optimizer steps on it.

Mini-batches are cut from the batch in order, as in verl: ``ppo_mini_batch_size`` prompts each, in
each of ``ppo_epochs`` passes. Micro-batches only bound memory; loss, gradient and metrics do not
depend on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from tandem.api import Loss, ReferencePolicy, Scores, TrainEngine
from tandem.config.schema.actor import ActorConfig
from tandem.config.schema.critic import CriticConfig
from tandem.data.balance import batch_cost, deal
from tandem.data.packing import (
    Plan,
    TrainSequence,
    in_sequence_order,
    pack_microbatches,
    with_packed_routes,
)
from tandem.metrics.activity import Phase
from tandem.pipeline.batch import as_bools
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience
from tandem.pipeline.microbatches import MicrobatchLimits, microbatch_limits
from tandem.types import LossScale, UpdateReport


class Survey(Protocol):
    """A function that completes the columns of a mini-batch under the current weights.

    ``members`` are the sequences of the mini-batch; ``number`` steps were taken on this batch.
    """

    async def __call__(
        self, experience: Experience, *, members: Sequence[int], number: int
    ) -> Experience: ...


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """An optimizer step and the sequences it covered.

    Attributes:
        report: the report of the engine.
        lengths: the number of tokens of each computed sequence.
        shares: the computed sequences of each rank, as indices into ``lengths``.
        num_counted: the number of sequences in the denominators of the loss.
        rescale: the loss tokens of the counted sequences divided by those of the computed ones.
    """

    report: UpdateReport
    lengths: Sequence[int]
    shares: Sequence[Sequence[int]]
    num_counted: int
    rescale: float


@dataclass(frozen=True, slots=True)
class ScoredSequences:
    """The scores (R,) of the loss tokens of sequences, and the sequences."""

    score_R: Tensor
    sequences: Sequence[TrainSequence]


def limits_of(context: RunContext, role: str) -> MicrobatchLimits:
    """Return the limits of the micro-batches of ``role``."""
    return microbatch_limits(context.config, role, preferred_tokens=context.preferred_tokens)


async def score_sequences(
    context: RunContext,
    engine: ReferencePolicy,
    *,
    sequences: Sequence[TrainSequence],
    limits: MicrobatchLimits,
    temperature: float = 1.0,
) -> Tensor:
    """Return a model's score of each loss token in the order of the sequences, fp32 (R,).

    The score is a log-prob for a policy, and a value for a critic or a reward model.
    """
    scored = await score_and_route(
        context,
        engine,
        sequences=sequences,
        limits=limits,
        temperature=temperature,
        with_squares=False,
    )
    return scored.score_R


async def score_and_route(
    context: RunContext,
    engine: ReferencePolicy,
    *,
    sequences: Sequence[TrainSequence],
    limits: MicrobatchLimits,
    temperature: float,
    with_squares: bool,
    with_routes: bool = False,
) -> ScoredSequences:
    """Return what ``score_sequences`` returns, with the sequences.

    With ``with_routes``, they have the experts that computed them in this pass.
    """

    async def score(plan: Plan) -> ScoredSequences:
        batches = [
            replace(batch, with_squares=with_squares, with_routes=with_routes)
            for batch in pack_microbatches(sequences, plan)
        ]
        scored: list[Scores] = await context.runtime.call(engine.score, batches, temperature)
        columns = [scores.score_R for scores in scored]
        column_R = in_sequence_order(columns, sequences=sequences, plan=plan)
        if not with_routes:
            return ScoredSequences(column_R, sequences)
        routes = [scores.routes_TLK for scores in scored if scores.routes_TLK is not None]
        routed = with_packed_routes(routes, sequences=sequences, plan=plan)
        return ScoredSequences(column_R, routed)

    return await context.memory.run(score, sequences, limits=limits.on(engine))


async def take_steps(
    context: RunContext,
    experience: Experience,
    *,
    engine: TrainEngine,
    loss: Loss,
    limits: MicrobatchLimits,
    settings: ActorConfig | CriticConfig,
    temperature: float = 1.0,
    survey: Survey | None = None,
) -> list[OptimizerStep]:
    """Take all optimizer steps of one model on one batch, in order.

    Args:
        settings: the model's section, which determines the mini-batches.
        survey: completes the columns of each mini-batch, if the loss depends on all of it.
    """
    size = settings.ppo_mini_batch_size * context.config.actor_rollout_ref.rollout.n
    minibatches = _cut(len(experience.sequences), size, settings=settings)
    is_counted, is_computed = as_bools(experience.batch.valid_N), as_bools(experience.computed_N)
    phase = Phase.UPDATE_CRITIC if engine is context.engines.critic else Phase.UPDATE
    steps: list[OptimizerStep] = []
    with context.activity.during(phase, total=len(minibatches), done=lambda: len(steps)):
        for chosen in minibatches:
            counted = [i for i in chosen if is_counted[i]]
            current = experience
            if survey is not None:
                current = await survey(experience, members=counted, number=len(steps))
            step = _take_step(
                context,
                current,
                counted=counted,
                computed=[i for i in chosen if is_computed[i]],
                engine=engine,
                loss=loss,
                limits=limits.on(engine),
                temperature=temperature,
            )
            steps.append(await step)
    await context.runtime.call(engine.advance_schedule)
    return steps


async def _take_step(
    context: RunContext,
    experience: Experience,
    *,
    counted: Sequence[int],
    computed: Sequence[int],
    engine: TrainEngine,
    loss: Loss,
    limits: MicrobatchLimits,
    temperature: float,
) -> OptimizerStep:
    sequences, drawn = experience.sequences, experience.batch.sequences
    num_tokens = sum(drawn[i].num_loss_tokens for i in counted)
    num_computed = sum(sequences[i].num_loss_tokens for i in computed)
    scale = LossScale(num_tokens=max(num_tokens, 1), num_sequences=max(len(counted), 1))

    async def update(plan: Plan) -> OptimizerStep:
        members = [[computed[i] for i in microbatch] for microbatch in plan]
        batches = pack_microbatches(sequences, members, columns=experience.columns)
        report: UpdateReport = await context.runtime.call(
            engine.update, batches, loss, scale=scale, temperature=temperature
        )
        dealt = deal([batch_cost(batch) for batch in batches], engine.data_parallel_size)
        return OptimizerStep(
            report,
            lengths=[sequences[i].num_tokens for i in computed],
            shares=[[i for number in mine for i in plan[number]] for mine in dealt],
            num_counted=len(counted),
            rescale=scale.num_tokens / max(num_computed, 1),
        )

    return await context.memory.run(update, [sequences[i] for i in computed], limits=limits)


def _cut(num_sequences: int, size: int, *, settings: ActorConfig | CriticConfig) -> list[list[int]]:
    """Return the sequences of each mini-batch, of all passes over the batch in order."""
    seed = settings.data_loader_seed if settings.shuffle else None
    orders = [_sequence_order(num_sequences, seed, epoch=i) for i in range(settings.ppo_epochs)]
    starts = range(0, num_sequences, size)
    return [order[start : start + size] for order in orders for start in starts]


def _sequence_order(num_sequences: int, seed: int | None, *, epoch: int) -> list[int]:
    """Return the order of the sequences: that of the batch, or a random one for each pass."""
    if seed is None:
        return list(range(num_sequences))
    generator = torch.Generator().manual_seed(seed + epoch)
    return [int(i) for i in torch.randperm(num_sequences, generator=generator)]
