# SPDX-License-Identifier: Apache-2.0
"""The size of micro-batches, and its reduction when the device runs out of memory.

Micro-batches only bound memory: loss, gradient and metrics do not depend on them. A pass that runs
out of memory is therefore repeated with half the size, which is kept for the rest of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from tandem.api import ReferencePolicy
from tandem.config.derived.microbatches import limits
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.data.packing import Plan, TrainSequence, plan_microbatches
from tandem.errors import UserError

logger = logging.getLogger(__name__)

R = TypeVar("R")
_REMEDY = (
    "Set actor_rollout_ref.model.enable_gradient_checkpointing=True, lower "
    "actor_rollout_ref.rollout.gpu_memory_utilization, or shorten the sequences."
)


@dataclass(frozen=True, slots=True)
class MicrobatchLimits:
    """The limits of micro-batches: ``max_tokens``, or ``max_sequences`` if that is None.

    Attributes:
        key: the configuration key of ``max_tokens``.
        max_sequences: the largest number of sequences.
        max_tokens: the largest number of packed tokens.
        preferred_tokens: the size that the platform computes fastest, used if it is smaller than
            ``max_tokens``; None if the user chose the size. A longer sequence exceeds it.
        num_ranks: the number of ranks that compute micro-batches at the same time.
        by_cost: whether ranks get equal costs; else they get equal numbers of sequences.
    """

    key: str
    max_sequences: int | None
    max_tokens: int | None
    preferred_tokens: int | None
    num_ranks: int = 1
    by_cost: bool = True

    def plan(self, sequences: Sequence[TrainSequence]) -> Plan:
        """Plan micro-batches within the limits. Raise UserError if one sequence is too long."""
        if self.max_tokens is None:
            return plan_microbatches(
                sequences,
                max_sequences=self.max_sequences,
                multiple_of=self.num_ranks,
                by_cost=self.by_cost,
            )
        max_tokens = self.max_tokens
        if self.preferred_tokens is not None:
            max_tokens = min(max_tokens, max(self.preferred_tokens, _longest(sequences)))
        return plan_microbatches(
            sequences,
            max_tokens=max_tokens,
            key=self.key,
            multiple_of=self.num_ranks,
            by_cost=self.by_cost,
        )

    def on(self, engine: ReferencePolicy) -> MicrobatchLimits:
        """Return these limits of one device, scaled to all devices of ``engine``."""
        factor = engine.sequence_parallel_size
        return replace(
            self,
            max_tokens=_scaled(self.max_tokens, factor),
            preferred_tokens=_scaled(self.preferred_tokens, factor),
            num_ranks=engine.data_parallel_size,
        )


def microbatch_limits(
    config: RunConfig | SftConfig, role: str, *, preferred_tokens: int | None
) -> MicrobatchLimits:
    """Return the limits of the micro-batches of ``role``, a key of ``RUN_MICROBATCHES``.

    ``preferred_tokens``, the size that the platform prefers, is used if it is smaller, unless the
    user asked to fill micro-batches by tokens.
    """
    bounds = limits(config, role)
    return MicrobatchLimits(
        key=bounds.key,
        max_sequences=bounds.max_sequences,
        max_tokens=bounds.max_tokens,
        preferred_tokens=None if bounds.is_dynamic else preferred_tokens,
        by_cost=config.trainer.balance_batch,
    )


class MemoryFit:
    """The largest size of micro-batches that has been found to fit the device.

    Args:
        remedy: the advice to the user if a single sequence does not fit.

    Attributes:
        max_tokens: the size in packed tokens; None until the device ran out of memory.
    """

    def __init__(self, remedy: str = _REMEDY) -> None:
        self.max_tokens: int | None = None
        self._remedy = remedy

    async def run(
        self,
        compute: Callable[[Plan], Awaitable[R]],
        sequences: Sequence[TrainSequence],
        *,
        limits: MicrobatchLimits,
    ) -> R:
        """Compute a plan for ``sequences``; try smaller ones while the device runs out of memory.

        Args:
            compute: a pass over a plan. If it runs out of memory, it must leave nothing behind.

        Raises:
            UserError: a single sequence does not fit.
        """
        while True:
            plan = self._plan(sequences, limits)
            try:
                return await compute(plan)
            except torch.OutOfMemoryError:
                self._halve(sequences, plan, key=limits.key)

    def _plan(self, sequences: Sequence[TrainSequence], limits: MicrobatchLimits) -> Plan:
        plan = limits.plan(sequences)
        if self.max_tokens is None:
            return plan
        max_tokens = max(self.max_tokens, _longest(sequences))
        if max((_num_tokens(sequences, members) for members in plan), default=0) <= max_tokens:
            return plan
        smaller = replace(limits, max_sequences=None, max_tokens=max_tokens, preferred_tokens=None)
        return smaller.plan(sequences)

    def _halve(self, sequences: Sequence[TrainSequence], plan: Plan, *, key: str) -> None:
        largest = max(plan, key=lambda members: _num_tokens(sequences, members))
        size = _num_tokens(sequences, largest)
        if len(largest) == 1:
            rule = f"a micro-batch of one sequence, {size} tokens, does not fit the device"
            raise UserError("out of memory", rule=rule, remedy=self._remedy) from None
        self.max_tokens = size // 2
        logger.warning(
            "out of memory with micro-batches of %d tokens: repeating with at most %d from now on "
            "(results stay the same; set %s to start with this size)",
            size,
            self.max_tokens,
            key,
        )


def _scaled(tokens: int | None, factor: int) -> int | None:
    return None if tokens is None else tokens * factor


def _longest(sequences: Sequence[TrainSequence]) -> int:
    return max((sequence.num_tokens for sequence in sequences), default=0)


def _num_tokens(sequences: Sequence[TrainSequence], members: Sequence[int]) -> int:
    """Return the number of packed tokens; a prompt that neighbours share counts once."""
    total, last = 0, None
    for sequence in (sequences[i] for i in members):
        shared = sequence.prompt_key == last
        total += sequence.num_response_tokens + (0 if shared else len(sequence.prompt_ids))
        last = sequence.prompt_key
    return total
