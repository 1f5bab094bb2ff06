# SPDX-License-Identifier: Apache-2.0
"""Passes that run out of memory are repeated with smaller micro-batches, and only those."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from tandem.data.packing import Plan, TrainSequence
from tandem.errors import UserError
from tandem.pipeline.microbatches import MemoryFit, MicrobatchLimits

LIMITS = MicrobatchLimits("the.key", max_sequences=None, max_tokens=100, preferred_tokens=None)
SEQUENCES = [TrainSequence(key, (1,) * 4, (2,) * 8) for key in (0, 0, 1, 1, 2, 2, 3, 3)]


class Device:
    """Computes micro-batches of up to ``room`` sequences."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.plans: list[Plan] = []

    async def compute(self, plan: Plan) -> list[int]:
        """The sequences in the order of the plan."""
        self.plans.append(plan)
        if max(map(len, plan)) > self.room:
            raise torch.OutOfMemoryError("no room")
        return [i for members in plan for i in members]


def test_all_sequences_are_computed_once_with_half_of_the_tokens(caplog) -> None:
    device, memory = Device(room=4), MemoryFit()
    with caplog.at_level(logging.WARNING):
        computed = asyncio.run(memory.run(device.compute, SEQUENCES, limits=LIMITS))
    assert sorted(computed) == list(range(8))
    assert [len(plan) for plan in device.plans] == [1, 2]
    assert memory.max_tokens == 40
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "out of memory with micro-batches of 80 tokens"
    ]


def test_what_fits_is_remembered() -> None:
    device, memory = Device(room=4), MemoryFit()
    for _ in range(2):
        asyncio.run(memory.run(device.compute, SEQUENCES, limits=LIMITS))
    assert [len(plan) for plan in device.plans] == [1, 2, 2]


def test_limits_by_count_give_way_too() -> None:
    limits = MicrobatchLimits("the.key", max_sequences=8, max_tokens=None, preferred_tokens=None)
    device, memory = Device(room=2), MemoryFit()
    computed = asyncio.run(memory.run(device.compute, SEQUENCES, limits=limits))
    assert sorted(computed) == list(range(8))
    assert max(map(len, device.plans[-1])) == 2


def test_one_sequence_that_does_not_fit_is_the_end() -> None:
    device, memory = Device(room=0), MemoryFit()
    with pytest.raises(UserError, match="one sequence, 12 tokens.*gradient_checkpointing=True"):
        asyncio.run(memory.run(device.compute, SEQUENCES, limits=LIMITS))
    with pytest.raises(UserError, match="does not fit the device. Take a larger one.$"):
        fit = MemoryFit("Take a larger one.")
        asyncio.run(fit.run(device.compute, SEQUENCES, limits=LIMITS))


def test_nothing_to_compute_is_no_micro_batch() -> None:
    async def count(plan: Plan) -> int:
        return len(plan)

    assert asyncio.run(MemoryFit().run(count, [], limits=LIMITS)) == 0
