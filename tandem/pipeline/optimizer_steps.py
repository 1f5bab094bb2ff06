# SPDX-License-Identifier: Apache-2.0
"""Passes of a model over a batch, policy or critic: scoring it, and the optimizer steps on it.

Mini-batches are cut from the batch in order (verl's meaning: ``ppo_mini_batch_size`` prompts each,
``ppo_epochs`` times over). Micro-batches only bound memory; loss, gradient and metrics do not
depend on them. A sequence that is counted and not computed is part of the denominators only. What
rejection leaves out (``rollout_correction.rollout_rs``) does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from tandem.api import Loss, ReferencePolicy, TrainEngine
from tandem.data.balance import batch_cost, deal
from tandem.data.packing import Plan, TrainSequence, in_sequence_order, pack_microbatches
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience, as_bools
from tandem.pipeline.microbatches import MicrobatchLimits
from tandem.types import LossColumns, LossScale, UpdateReport


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


@dataclass(frozen=True, slots=True)
class Updates:
    """The optimizer steps of one model on one batch.

    Attributes:
        size: sequences of a mini-batch.
        shuffle_seed: of the order that mini-batches are cut in; None is that of the batch.
    """

    engine: TrainEngine
    loss: Loss
    limits: MicrobatchLimits
    temperature: float
    size: int
    num_epochs: int
    shuffle_seed: int | None


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step that was taken, and over what.

    Attributes:
        lengths: of the sequences that were computed; ``shares`` deals them to the ranks.
        num_counted: sequences in the denominators.
        rescale: all tokens in the denominators by those that were computed.
    """

    report: UpdateReport
    lengths: Sequence[int]
    shares: Sequence[Sequence[int]]
    num_counted: int
    rescale: float


def rows_to_train(
    experience: Experience, columns: LossColumns, *, computed_N: Tensor
) -> TrainingRows:
    """The batch without its rejected tokens and without sequences that none are left of.

    Args:
        columns: over all tokens of the batch.
        computed_N: some of the valid sequences.
    """
    batch, kept_R = experience.batch, experience.kept_R
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


async def score_sequences(
    parts: RunContext,
    engine: ReferencePolicy,
    *,
    sequences: Sequence[TrainSequence],
    limits: MicrobatchLimits,
    temperature: float,
) -> Tensor:
    """What a model says of all response tokens, in the order of the sequences, fp32 (R,)."""

    async def score(plan: Plan) -> Tensor:
        batches = pack_microbatches(sequences, plan)
        columns = await parts.runtime.call(engine.score, batches, temperature)
        return in_sequence_order(columns, sequences=sequences, plan=plan)

    return await parts.memory.run(score, sequences, limits=limits.on(engine))


async def take_steps(
    parts: RunContext, rows: TrainingRows, *, updates: Updates
) -> list[OptimizerStep]:
    """All optimizer steps on one batch, in order."""
    num_sequences = len(rows.sequences)
    steps: list[OptimizerStep] = []
    for epoch in range(updates.num_epochs):
        order = _sequence_order(num_sequences, updates.shuffle_seed, epoch=epoch)
        for start in range(0, num_sequences, updates.size):
            chosen = order[start : start + updates.size]
            steps.append(await _optimizer_step(parts, rows, chosen=chosen, updates=updates))
    await parts.runtime.call(updates.engine.advance_schedule)
    return steps


async def _optimizer_step(
    parts: RunContext, rows: TrainingRows, *, chosen: Sequence[int], updates: Updates
) -> OptimizerStep:
    sequences, engine = rows.sequences, updates.engine
    is_counted, is_computed = as_bools(rows.counted_N), as_bools(rows.computed_N)
    valid = [i for i in chosen if is_counted[i]]
    computed = [i for i in chosen if is_computed[i]]
    num_tokens = sum(sequences[i].num_loss_tokens for i in valid)
    scale = LossScale(num_tokens=max(num_tokens, 1), num_sequences=max(len(valid), 1))
    num_computed = sum(sequences[i].num_loss_tokens for i in computed)

    async def update(plan: Plan) -> OptimizerStep:
        members = [[computed[i] for i in microbatch] for microbatch in plan]
        batches = pack_microbatches(sequences, members, columns=rows.columns)
        report: UpdateReport = await parts.runtime.call(
            engine.update, batches, updates.loss, scale=scale, temperature=updates.temperature
        )
        dealt = deal([batch_cost(batch) for batch in batches], engine.data_parallel_size)
        return OptimizerStep(
            report,
            [len(sequences[i].prompt_ids) + len(sequences[i].response_ids) for i in computed],
            [[i for number in mine for i in plan[number]] for mine in dealt],
            num_counted=len(valid),
            rescale=scale.num_tokens / max(num_computed, 1),
        )

    return await parts.memory.run(
        update, [sequences[i] for i in computed], limits=updates.limits.on(engine)
    )


def _sequence_order(num_sequences: int, seed: int | None, *, epoch: int) -> list[int]:
    """The order mini-batches are cut in: that of the batch, or a seeded one an epoch."""
    if seed is None:
        return list(range(num_sequences))
    generator = torch.Generator().manual_seed(seed + epoch)
    return [int(i) for i in torch.randperm(num_sequences, generator=generator)]
