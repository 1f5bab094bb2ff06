# SPDX-License-Identifier: Apache-2.0
"""A run with tools and agents whose processes are killed while they are at work (M13, M23).

Simulated users live in environment processes, other rows are answered by commands. What is killed
is an environment process, a command, or the run itself, which is then started again.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import pytest

from tandem.quickstart.materials import Materials
from tests.chaos.processes import MARK, none_left
from tests.fakes.calculator_run import GRPO, let_turns_end, write_materials
from tests.fakes.commands import TIMEOUT_S, Command, Conditions
from tests.fakes.tiny_run import metrics_of, read_lines

NUM_STEPS, BATCH, SAMPLES = 12, 4, 4
MAX_RUNS = 10
KILLS = {"environment": 8, "command": 6, "run": 10}
MORE_KILLS = {"environment": 20, "command": 20, "run": 10}
CLASS = """
import asyncio
from verl.interactions.base import BaseInteraction


def note():
    with open({notes!r}, "a") as file:
        file.write(".")


class Patient(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.left = {{**getattr(self, "left", {{}}), instance_id: 2}}

    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(0.1)
        note()
        self.left[instance_id] -= 1
        return self.left[instance_id] < 0, "and then?", 0.0, {{}}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.left[instance_id]
"""
COMMAND = """
import json, os, socket, sys, time

task = json.load(sys.stdin)
body = json.dumps({{"messages": task["messages"], "max_tokens": 4}}).encode()
host, port = os.environ["OPENAI_BASE_URL"].split("/")[2].split(":")
time.sleep(0.05)
with socket.create_connection((host, int(port))) as link:
    link.sendall(
        b"POST /v1/chat/completions HTTP/1.1\\r\\nhost: x\\r\\nconnection: close\\r\\n"
        + f"authorization: Bearer {{os.environ['OPENAI_API_KEY']}}\\r\\n".encode()
        + f"content-length: {{len(body)}}\\r\\n\\r\\n".encode()
        + body
    )
    assert b" 200 " in link.makefile("rb").readline()
open({notes!r}, "a").write(".")
time.sleep(0.05)
"""
REWARD = """
import zlib


def graded(data_source, solution_str, ground_truth, extra_info):
    return 0.25 + zlib.crc32(solution_str.encode()) % 4 / 4
"""


@dataclass(frozen=True)
class Program:
    """The command of the run, and where its tools and agents note that they have answered."""

    arguments: list[str]
    run: Path
    notes: Path

    def num_answers(self) -> int:
        """Return how many answers there have been so far."""
        return self.notes.stat().st_size


def write_program(materials: Materials, folder: Path) -> Program:
    """Write users, a command, a reward and rows; every fourth row is answered by the command."""
    run, notes = folder / "run", folder / "notes"
    notes.touch()
    (folder / "patient.py").write_text(CLASS.format(notes=str(notes)))
    (folder / "command.py").write_text(COMMAND.format(notes=str(notes)))
    (folder / "reward.py").write_text(REWARD)
    users = [{"name": "patient", "class_name": "patient.Patient", "config": {}}]
    (folder / "users.yaml").write_text(json.dumps({"interaction": users}))
    argv = [sys.executable, "-S", str(folder / "command.py")]
    agents = [{"name": "asked", "kind": "command", "argv": argv}]
    (folder / "agents.yaml").write_text(json.dumps(agents))
    table = pq.read_table(materials.train)
    rows = [_row(row, number) for number, row in enumerate(table.to_pylist() * 5)]
    pq.write_table(type(table).from_pylist(rows[: NUM_STEPS * BATCH]), folder / "rows.parquet")
    rollout = "actor_rollout_ref.rollout"
    keys = [
        f"actor_rollout_ref.model.path={materials.model}",
        f"data.train_files={folder / 'rows.parquet'}",
        "data.val_files=[]",
        f"data.train_batch_size={BATCH}",
        "data.max_response_length=80",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
        f"{rollout}.n={SAMPLES}",
        f"{rollout}.multi_turn.interaction_config_path={folder / 'users.yaml'}",
        f"{rollout}.agent.agent_loop_config_path={folder / 'agents.yaml'}",
        f"{rollout}.agent.num_workers=4",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "custom_reward_function.name=graded",
        f"trainer.default_local_dir={run}",
        f"trainer.rollout_data_dir={run / 'dumps'}",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.async_pipeline=True",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "trainer.device=cpu",
        "trainer.generate_ahead_steps=1",
        "trainer.resume_mode=auto",
        "trainer.save_freq=1",
        "trainer.logger=[console]",
    ]
    return Program(["train", GRPO, *keys], run, notes)


def _row(row: dict[str, Any], number: int) -> dict[str, Any]:
    """Return a row that can be told from others by its ground truth."""
    user = {"interaction_kwargs": {"name": "patient"}}
    return {
        **row,
        "agent_name": "asked" if number % 4 == 3 else "tool_agent",
        "extra_info": {**(row.get("extra_info") or {}), **user},
        "reward_model": {"style": "rule", "ground_truth": str(number)},
    }


def victims_of(pid: int, kind: str) -> list[psutil.Process]:
    """Return the processes of a kind that the run has at this moment."""
    word = {"environment": "tandem.agents.worker", "command": "command.py"}[kind]
    found = []
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if any(word in part for part in child.cmdline()):
                    found.append(child)
    return found


class Killed:
    """A run that is started again whenever it was killed."""

    def __init__(self, program: Program, folder: Path, *, draw: random.Random) -> None:
        self.mark, self.path = uuid.uuid4().hex, program.run
        self._program, self._folder, self._draw = program, folder, draw
        self._num_starts = 0
        self.command = self.start()

    def start(self) -> Command:
        """Start the run, or continue it."""
        self._num_starts += 1
        variables = {MARK: self.mark, "PYTHONPATH": str(self._folder)}
        folder = self._folder / f"start-{self._num_starts}"
        conditions = Conditions(environment=variables)
        self.command = Command(self._program.arguments, folder=folder, conditions=conditions)
        return self.command

    def kill(self, kind: str) -> bool:
        """Kill one of its processes after a few more answers, at any moment of its life.

        Returns:
            whether it was killed; False if the run has ended before.
        """
        wanted = self._program.num_answers() + self._draw.randint(2, 12)
        if not self._wait(lambda: self._program.num_answers() >= wanted):
            return False
        if kind == "run":
            self.command.signal(signal.SIGKILL)
            has_ended = self.command.wait().code == 0
            if not has_ended:
                self.start()
            return not has_ended
        if not self._wait(lambda: bool(victims_of(self.command.pid, kind))):
            return False
        for victim in self._draw.sample(found := victims_of(self.command.pid, kind), len(found)):
            with suppress(psutil.NoSuchProcess):
                victim.kill()
                return True
        return False

    def finish(self) -> None:
        """Wait for the end of the run."""
        end = self.command.wait()
        assert end.code == 0, end.stderr

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; return False if the run ends before."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            if not self.command.is_running:
                return False
            assert time.monotonic() < deadline, f"it hangs: {self.command.output()}"
            time.sleep(0.005)
        return True


def _described(kills: dict[str, int]) -> str:
    return f"{sum(kills.values())} kills"


@pytest.fixture(
    scope="module", params=[KILLS, pytest.param(MORE_KILLS, marks=pytest.mark.deep)], ids=_described
)
def ended(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Killed]:
    """Return the runs in which processes were killed. On a fast machine there are several."""
    folder = tmp_path_factory.mktemp("killed")
    materials = write_materials(folder / "calculator")
    let_turns_end(materials.model)
    draw = random.Random(21)
    runs: list[Killed] = []

    def begin() -> None:
        own = folder / f"run-{len(runs)}"
        own.mkdir()
        runs.append(Killed(write_program(materials, own), own, draw=draw))

    begin()
    kinds = [kind for kind, number in request.param.items() for _ in range(number)]
    draw.shuffle(kinds)
    for kind in kinds:
        while not runs[-1].kill(kind):
            runs[-1].finish()
            assert len(runs) < MAX_RUNS, "runs end before a process can be killed"
            begin()
    runs[-1].finish()
    return runs


def dumped(run: Path) -> Iterable[dict[str, Any]]:
    """All samples that were trained on."""
    files = [run / f"dumps/{step}.jsonl" for step in range(1, NUM_STEPS + 1)]
    return [row for file in files for row in read_lines(file)]


def test_m23_every_prompt_is_trained_on_once(ended: list[Killed]) -> None:
    for run in ended:
        counts = Counter(row["gts"] for row in dumped(run.path))
        assert counts == {str(number): SAMPLES for number in range(NUM_STEPS * BATCH)}


def test_m13_what_a_kill_ended_has_no_score_and_is_out_of_its_baseline(
    ended: list[Killed],
) -> None:
    found: list[float | None] = []
    for run in ended:
        scores = [row["score"] for row in dumped(run.path)]
        rows = metrics_of(run.path)
        failed = sum(rows[step]["agent/failed"] for step in rows if step)
        assert failed == scores.count(None)
        found += scores
    assert None in found, "no kill has hit an episode"
    assert min(score for score in found if score is not None) == 0.25, "as the reward gives"


def test_m13_no_process_is_left(ended: list[Killed]) -> None:
    assert all(none_left(run.mark) for run in ended)
