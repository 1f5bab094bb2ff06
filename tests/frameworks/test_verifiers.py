# SPDX-License-Identifier: Apache-2.0
"""A taskset of verifiers in an interpreter of its own, against the endpoint (M26).

verifiers is no dependency of tandem: ``make test-verifiers`` installs it into an environment of its
own and names its interpreter in TANDEM_VERIFIERS_PYTHON.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.agents.endpoint import Endpoint, open_endpoint
from tandem.agents.programs import Programs, without_proxy
from tandem.agents.setup import ProgramEnd, ProgramSpec, Task
from tandem.data.span_tree import rows_of
from tandem.pipeline.sessions import ProgramSession
from tandem.types import EpisodeEnd, EpisodeRecord, GenerationRequest, SamplingParams
from tests.fakes.played_programs import QWEN, SAMPLE, ScriptedRollout, conversing_of

PYTHON = os.environ.get("TANDEM_VERIFIERS_PYTHON", "")
ROOT = Path(__file__).parents[2]
ARGV = (PYTHON, str(ROOT / "examples/agent/verifiers_taskset.py"), "sums_taskset")
ENVIRONMENT = without_proxy({**os.environ, "PYTHONPATH": str(ROOT / "tests/fakes")})
LIMIT_S = 300
"""The time of an episode; the first one lets uv install what the harness needs."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs verifiers: make test-verifiers")


class Taskset:
    """A taskset whose episodes a policy plays that knows the sums of even numbers only."""

    def __init__(self, programs: Programs, endpoint: Endpoint) -> None:
        self._programs, self._endpoint = programs, endpoint

    async def play(self, row: dict[str, Any], *, held: asyncio.Event | None = None) -> ProgramEnd:
        """Play the episode of a row; ``held`` is set when the policy, which waits, is asked."""
        number = row["extra_info"]["task"] + 1
        rollout = ScriptedRollout([f"It is {2 * number + number % 2}.<|im_end|>"], QWEN)
        engine: Any = rollout
        request = GenerationRequest((SAMPLE,), (1, 2), SamplingParams(1.0, 1.0, -1, 4000))
        conversing = conversing_of(QWEN, max_prompt_tokens=60_000)
        session = ProgramSession(request, conversing=conversing, rollout=engine)
        task = Task(tuple(row["prompt"]), "", row["extra_info"], 7, (7, 0), ())
        access = self._endpoint.admit(session)
        if held is not None:
            rollout.is_held.clear()
        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                ending = tasks.create_task(self._programs.run("sums", task, access=access))
                while held is not None and not rollout.requests:
                    await asyncio.sleep(0.05)
                if held is not None:
                    held.set()
                end = await ending
        finally:
            self._endpoint.close(access)
            await session.close()
        if held is not None:
            return end
        trajectory = session.trajectory(EpisodeRecord(EpisodeEnd.DONE))
        (drawn,), (ours,) = rollout.completions, trajectory.completions
        assert ours.token_ids == drawn.token_ids and len(rows_of(trajectory)) == 1
        return end


def playing(folder: Path, body: Callable[[Taskset], Awaitable[Any]]) -> Any:
    """Run ``body`` with the taskset, and look for processes that are left."""

    async def main() -> Any:
        specs = {"sums": ProgramSpec("sums", argv=ARGV, gives_reward=True, num_processes=1)}
        no_pool: Any = None
        programs = Programs(specs, pool=no_pool, environment=ENVIRONMENT, log=folder / "log")
        named: list[str] = []
        async with open_endpoint(("127.0.0.1", 0), name_once=named.append) as endpoint:
            try:
                return await body(Taskset(programs, endpoint))
            finally:
                await programs.close()

    before = children()
    result = asyncio.run(main())
    assert children() <= before
    return result


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def players() -> set[psutil.Process]:
    return {one for one in children() if one.cmdline()[: len(ARGV)] == list(ARGV)}


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    subprocess.run([*ARGV, "--rows", str(file)], env=ENVIRONMENT, check=True)
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_m26_rewards_are_those_of_the_taskset_and_a_broken_one_is_no_reward(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    assert [row["extra_info"]["task"] for row in rows] == list(range(9))
    assert rows[1]["prompt"] == [{"role": "user", "content": "What is 2 + 2?"}]

    async def body(taskset: Taskset) -> list[ProgramEnd]:
        # The first episode installs what the harness needs.
        first = await taskset.play(rows[0])
        rest = [
            end
            for begin in (1, 5)
            for end in await asyncio.gather(*map(taskset.play, rows[begin : begin + 4]))
        ]
        assert len(players()) == 1, "one process plays all of them"
        return [first, *rest]

    *summed, broken = playing(tmp_path, body)
    assert [(end.returned or {}).get("reward") for end in summed] == [0.0, 1.0] * 4
    assert [end.failure for end in summed] == [""] * 8
    assert broken.returned is None and "the judge is broken" in broken.failure


def test_an_episode_that_is_stopped_and_a_process_that_dies_are_replaced(
    tmp_path: Path, rows: list[dict[str, Any]]
) -> None:
    async def body(taskset: Taskset) -> list[ProgramEnd]:
        is_asked = asyncio.Event()
        first, stopped = rows[1], asyncio.create_task(taskset.play(rows[3], held=is_asked))
        await is_asked.wait()
        (player,) = players()
        during = await taskset.play(first)
        harnesses = set(player.children(recursive=True))
        assert harnesses, "the harness of the episode that waits"
        stopped.cancel()
        await asyncio.wait((stopped,))
        async with asyncio.timeout(LIMIT_S):
            while any(one.is_running() for one in harnesses):
                await asyncio.sleep(0.05)
        after = await taskset.play(first)
        assert players() == {player}
        is_asked.clear()
        lost = asyncio.create_task(taskset.play(rows[3], held=is_asked))
        await is_asked.wait()
        player.kill()
        assert await lost == ProgramEnd(failure="killed by SIGKILL")
        return [during, after, await taskset.play(first)]

    ends = playing(tmp_path, body)
    assert [(end.returned or {}).get("reward") for end in ends] == [1.0] * 3
