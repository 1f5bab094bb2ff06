# SPDX-License-Identifier: Apache-2.0
"""Processes of tools: answers that come too late, calls that hang, and what they keep."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, ToolLimits
from tandem.types import Observation, ToolStatus
from tests.children.test_tools import FUNCTIONS, in_pool, task, texts, turn
from tests.fakes.patience import PATIENCE_S


@pytest.fixture
def functions(tmp_path: Path) -> EnvironmentSetup:
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    limits = ToolLimits(max_parallel_calls=3, max_characters=40, timeout_s=10.0)
    return EnvironmentSetup(function_path=str(tmp_path / "functions.py"), limits=limits)


def test_an_answer_that_nobody_waits_for_any_more_is_dropped(functions: EnvironmentSetup) -> None:
    async def give_up(pool: EnvironmentPool) -> tuple[Observation, Observation, Observation]:
        await pool.start()
        late, other = pool.open(task(number=0)), pool.open(task(number=1))
        before = await other.step(turn(("give", {"what": "pid"})))
        asked = asyncio.create_task(late.step(turn(("wait", {"seconds": 0.3}))))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait([asked])
        waited = await other.step(turn(("wait", {"seconds": 0.4})))
        return before, waited, await other.step(turn(("give", {"what": "pid"})))

    before, waited, after = in_pool(functions, give_up)
    assert texts(waited) == ["waited 0.4"]
    assert texts(before) == texts(after), "the process of other episodes was killed"


def test_a_process_with_hanging_calls_is_killed_when_its_last_step_has_ended(
    functions: EnvironmentSetup,
) -> None:
    setup = replace(functions, limits=replace(functions.limits, timeout_s=0.5))

    async def hang(pool: EnvironmentPool) -> list[psutil.Process]:
        before = {*psutil.Process().children()}
        await pool.start()
        started = {*psutil.Process().children()} - before
        calls = [turn(("hang", {"seconds": 60})), turn(("wait", {"seconds": 60}))]
        steps = [pool.open(task(number=i)).step(call) for i, call in enumerate(calls)]
        for one in await asyncio.gather(*steps):
            assert one.statuses == (ToolStatus.TIMEOUT,)
        _, left = await asyncio.to_thread(psutil.wait_procs, started, PATIENCE_S / 4)
        return left

    assert in_pool(setup, hang) == []


def test_processes_keep_no_environments_without_state(functions: EnvironmentSetup) -> None:
    async def step_in_all(pool: EnvironmentPool) -> Observation:
        for number in range(3):
            await pool.open(task(number=number)).step(turn(("add", {"a": 1})))
        return await pool.open(task(number=9)).step(turn(("give", {"what": "environments"})))

    assert texts(in_pool(functions, step_in_all)) == ["1"]


def test_first_steps_are_spread_while_processes_start(functions: EnvironmentSetup) -> None:
    """A process that stays the home of its episodes would else get all that begin together."""

    async def ask_all(pool: EnvironmentPool) -> set[str]:
        sessions = [pool.open(task(number=i)) for i in range(6)]
        steps = [session.step(turn(("give", {"what": "pid"}))) for session in sessions]
        return {text for seen in await asyncio.gather(*steps) for text in texts(seen)}

    assert len(in_pool(functions, ask_all, num_processes=2)) == 2
