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
from pathlib import Path
from typing import Any

import pytest

from tandem.agents.endpoint import open_endpoint
from tandem.agents.programs import Programs, without_proxy
from tandem.agents.setup import ProgramEnd, ProgramSpec, Task
from tandem.data.span_tree import rows_of
from tandem.pipeline.sessions import ProgramSession
from tandem.types import EpisodeEnd, EpisodeRecord, GenerationRequest, SamplingParams
from tests.unit.pipeline.test_sessions import QWEN, SAMPLE, ScriptedRollout, conversing_of

PYTHON = os.environ.get("TANDEM_VERIFIERS_PYTHON", "")
ROOT = Path(__file__).parents[2]
ARGV = (PYTHON, str(ROOT / "examples/agent/verifiers_task.py"), "sums_taskset")
ENVIRONMENT = without_proxy({**os.environ, "PYTHONPATH": str(ROOT / "tests/fakes")})
LIMIT_S = 300
"""The time of an episode; the first one lets uv install what the harness needs."""

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs verifiers: make test-verifiers")


def test_m26_rewards_are_those_of_the_taskset_and_a_broken_one_is_no_reward(
    tmp_path: Path,
) -> None:
    file = tmp_path / "rows.jsonl"
    subprocess.run([*ARGV, "--rows", str(file)], env=ENVIRONMENT, check=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert [row["extra_info"]["task"] for row in rows] == list(range(9))
    assert rows[1]["prompt"] == [{"role": "user", "content": "What is 2 + 2?"}]

    async def main() -> list[ProgramEnd]:
        # The first episode installs what the harness needs.
        return [await play(rows[0], tmp_path)] + [
            end
            for begin in (1, 5)
            for end in await asyncio.gather(
                *(play(row, tmp_path) for row in rows[begin : begin + 4])
            )
        ]

    *summed, broken = asyncio.run(main())
    assert [(end.returned or {}).get("reward") for end in summed] == [0.0, 1.0] * 4
    assert [end.failure for end in summed] == [""] * 8
    assert broken.returned is None and "the judge is broken" in broken.failure


async def play(row: dict[str, Any], folder: Path) -> ProgramEnd:
    """Play the episode of a row with a policy that knows the sums of even numbers only."""
    number = row["extra_info"]["task"] + 1
    rollout = ScriptedRollout([f"It is {2 * number + number % 2}.<|im_end|>"], QWEN)
    engine: Any = rollout
    no_pool: Any = None
    request = GenerationRequest((SAMPLE,), (1, 2), SamplingParams(1.0, 1.0, -1, 4000))
    conversing = conversing_of(QWEN, max_prompt_tokens=60_000)
    session = ProgramSession(request, conversing=conversing, rollout=engine)
    specs = {"verifiers": ProgramSpec("verifiers", argv=ARGV, gives_reward=True)}
    programs = Programs(specs, pool=no_pool, environment=ENVIRONMENT, log=folder / "log")
    task = Task(tuple(row["prompt"]), "", row["extra_info"], 7, (7, 0), ())
    named: list[str] = []
    async with (
        asyncio.timeout(LIMIT_S),
        open_endpoint(("127.0.0.1", 0), name_once=named.append) as endpoint,
    ):
        end = await programs.run("verifiers", task, access=endpoint.admit(session))
        await session.close()
    trajectory = session.trajectory(EpisodeRecord(EpisodeEnd.DONE))
    (drawn,), (ours,) = rollout.completions, trajectory.completions
    assert ours.token_ids == drawn.token_ids and len(rows_of(trajectory)) == 1
    return end
