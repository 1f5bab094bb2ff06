# SPDX-License-Identifier: Apache-2.0
"""How batches are formed: in the order of the draws, past stragglers, but never too late."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from tandem.pipeline.buffer import BatchRule, GroupBuffer
from tandem.planner.virtual_time import run_virtually
from tandem.types import Group, Prompt

IN_TURN = BatchRule(2, max_lag=0, passes_over=False)


def group(uid: int) -> Group:
    return Group(Prompt(uid, uid, (1,), "", "source", ""), ())


async def filled(
    rule: BatchRule, complete: tuple[int, ...], admitted: dict[int, int]
) -> GroupBuffer:
    """``admitted``: version by draw."""
    buffer = GroupBuffer(rule)
    for uid, version in admitted.items():
        buffer.expect([uid], version)
    for uid in complete:
        await buffer.put(group(uid))
    return buffer


async def taken(buffer: GroupBuffer, version: int) -> list[int] | None:
    """None if a batch has to wait."""
    try:
        scored = await asyncio.wait_for(buffer.take(version), 0.01)
    except TimeoutError:
        return None
    return [one.prompt.uid for one in scored]


def batch(
    rule: BatchRule, complete: tuple[int, ...], admitted: dict[int, int], *, version: int
) -> list[int] | None:
    async def run() -> list[int] | None:
        return await taken(await filled(rule, complete, admitted), version)

    return run_virtually(run())


def test_groups_leave_in_the_order_of_their_draw() -> None:
    assert batch(IN_TURN, (1, 0), {0: 0, 1: 0}, version=0) == [0, 1]


def test_a_straggler_is_passed_over_and_waited_for_when_it_is_due() -> None:
    rule = BatchRule(2, max_lag=1, passes_over=True)
    admitted = dict.fromkeys(range(4), 0)
    assert batch(rule, (0, 2, 3), admitted, version=0) == [0, 2]
    assert batch(rule, (0, 2, 3), admitted | {4: 1, 5: 1}, version=1) is None


def test_so_many_groups_may_not_be_passed_over_that_they_come_due_together() -> None:
    """Draws 1 and 2 of version 0 would both have to be in the batch of one that version 2 uses."""
    rule = BatchRule(1, max_lag=2, passes_over=True)
    assert batch(rule, (3,), {1: 0, 2: 0, 3: 1}, version=1) is None
    assert batch(rule, (1, 3), {1: 0, 2: 0, 3: 1}, version=1) == [1]


def test_rounds_pass_over_nothing() -> None:
    rule = BatchRule(2, max_lag=1, passes_over=False)
    assert batch(rule, (0, 2, 3), dict.fromkeys(range(4), 0), version=0) is None
    assert batch(rule, (0, 1), dict.fromkeys(range(4), 0), version=0) == [0, 1]


@pytest.mark.parametrize("batches_ahead", [0, 0.1, 0.5, 1, 1.3, 2, 3, 4])
def test_a_batch_can_always_be_formed_in_time(batches_ahead: float) -> None:
    """With (batches_ahead + 1) batches of slots, and a largest lag of batches_ahead, rounded up,
    completions in any order never lead to a dead end.
    """
    max_lag = math.ceil(batches_ahead)

    async def run(rng: random.Random) -> None:
        size = rng.randint(1, 4)
        buffer = GroupBuffer(BatchRule(size, max_lag, passes_over=True))
        admitted: dict[int, int] = {}
        generating: list[int] = []
        for version in range(12):
            missing = size + int(batches_ahead * size) - len(admitted)
            fresh = range(version * 100, version * 100 + missing)
            buffer.expect(fresh, version)
            admitted |= dict.fromkeys(fresh, version)
            generating += fresh
            while (uids := await taken(buffer, version)) is None:
                await buffer.put(group(generating.pop(rng.randrange(len(generating)))))
            assert len(uids) == size
            assert all(version - admitted.pop(uid) <= max_lag for uid in uids)

    rng = random.Random(max_lag)
    for _ in range(8):
        run_virtually(run(rng))


def test_close_lets_take_return_what_there_is() -> None:
    async def take() -> list[int]:
        buffer = await filled(IN_TURN, (5,), {5: 0, 6: 0})
        waiting = asyncio.create_task(buffer.take(0))
        await asyncio.sleep(0)
        await buffer.close()
        return [scored.prompt.uid for scored in await waiting]

    assert run_virtually(take()) == [5]


def test_the_buffer_is_complete_when_the_groups_left_are_complete_or_dropped() -> None:
    async def run() -> list[bool]:
        buffer = await filled(IN_TURN, (0,), {0: 0, 1: 0, 2: 0})
        waiting = asyncio.create_task(buffer.wait_complete())
        seen = []
        for change in (buffer.put(group(1)), buffer.drop([2])):
            await change
            await asyncio.sleep(0)
            seen.append(waiting.done())
        await waiting
        return seen

    assert run_virtually(run()) == [False, True]
