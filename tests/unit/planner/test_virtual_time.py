# SPDX-License-Identifier: Apache-2.0
"""Virtual time: it passes in order, costs nothing, and a deadlock is an error."""

from __future__ import annotations

import asyncio

import pytest

from tandem.planner.virtual_time import DeadlockError, run_virtually
from tests.fakes.patience import sooner_than


def test_hours_pass_at_once_and_in_order() -> None:
    async def sleep(hours: float, log: list[float]) -> None:
        await asyncio.sleep(3600 * hours)
        log.append(asyncio.get_running_loop().time() / 3600)

    async def program() -> list[float]:
        log: list[float] = []
        async with asyncio.TaskGroup() as tasks:
            for hours in (5, 1, 3):
                tasks.create_task(sleep(hours, log))
        return log

    with sooner_than():
        assert run_virtually(program()) == pytest.approx([1, 3, 5])


def test_who_waits_for_nobody_is_told() -> None:
    async def program() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlockError):
        run_virtually(program())
