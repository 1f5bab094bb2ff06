# SPDX-License-Identifier: Apache-2.0
"""Admission slots: the documented example, the bound, and the end."""

import asyncio

import pytest

from tandem.pipeline.admission import AdmissionGate


def test_documented_trace() -> None:
    async def trace() -> list[int]:
        gate = AdmissionGate(num_slots=4, num_wanted=8)
        admitted = [await gate.admit()]
        await gate.release_dropped(1)
        admitted.append(await gate.admit())
        await gate.release_trained(4)
        admitted.append(await gate.admit())
        await gate.release_trained(4)
        admitted.append(await gate.admit())
        return admitted

    assert asyncio.run(trace()) == [4, 1, 4, 0]


def test_never_more_open_than_slots_nor_more_trained_than_wanted() -> None:
    async def trace() -> tuple[int, int]:
        gate = AdmissionGate(num_slots=6, num_wanted=9)
        most_open = total = trained = 0

        async def train() -> None:
            nonlocal trained
            for _ in range(3):
                await asyncio.sleep(0)
                await gate.release_trained(3)
                trained += 3

        async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
            tasks.create_task(train())
            while (count := await gate.admit()) > 0:
                total += count
                most_open = max(most_open, total - trained)
        return most_open, total

    assert asyncio.run(trace()) == (6, 9)


def test_admit_waits_for_a_release() -> None:
    async def trace() -> list[str]:
        gate = AdmissionGate(num_slots=1, num_wanted=2)
        events: list[str] = []
        await gate.admit()

        async def second() -> None:
            await gate.admit()
            events.append("admitted")

        task = asyncio.create_task(second())
        await asyncio.sleep(0)
        events.append("released")
        await gate.release_trained(1)
        await task
        return events

    assert asyncio.run(trace()) == ["released", "admitted"]


def test_no_more_is_charged_than_asked_for() -> None:
    async def trace() -> list[int]:
        gate = AdmissionGate(num_slots=6, num_wanted=9)
        return [await gate.admit(at_most) for at_most in (1, 4, 4)]

    assert asyncio.run(trace()) == [1, 4, 1]


def test_releasing_what_was_not_charged_is_our_defect() -> None:
    async def trace() -> None:
        gate = AdmissionGate(num_slots=2, num_wanted=2)
        await gate.release_dropped(1)

    with pytest.raises(RuntimeError, match="released 1 slots, only 0"):
        asyncio.run(trace())
