# SPDX-License-Identifier: Apache-2.0
"""``full_determinism``: turns in waves, so that a run repeats whatever its tools' times are (M23).

Simulated users answer after times that nothing repeats. One run goes through; the other is killed
at a moment that nothing repeats either, and started again.
"""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.config.check.rules import check_run
from tandem.driver import train
from tandem.errors import UserError
from tandem.quickstart.calculator import CALCULATOR_FILE
from tandem.quickstart.materials import Materials
from tests.fakes.calculator_run import GRPO, configured, train_on, write_materials
from tests.fakes.commands import TIMEOUT_S, Command

ROLLOUT = "actor_rollout_ref.rollout"
NUM_STEPS = 3
USER = """
import asyncio, random
from verl.interactions.base import BaseInteraction


class Patient(BaseInteraction):
    async def start_interaction(self, instance_id=None, **kwargs):
        self.left = {{**getattr(self, "left", {{}}), instance_id: 2}}

    async def generate_response(self, instance_id, messages, **kwargs):
        await asyncio.sleep(random.SystemRandom().random() * 0.1)
        open({notes!r}, "a").write(".")
        self.left[instance_id] -= 1
        return self.left[instance_id] < 0, "and then?", 0.0, {{}}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.left[instance_id]
"""
REWARD = """
import zlib


def graded(data_source, solution_str, ground_truth, extra_info):
    return 0.25 + zlib.crc32(solution_str.encode()) % 4 / 4
"""


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Materials:
    made = write_materials(tmp_path_factory.mktemp("calculator"))
    # A model that has learned nothing ends a turn once in four tokens.
    settings = made.model / "generation_config.json"
    known = json.loads(settings.read_text())
    known["eos_token_id"] = sorted({known["eos_token_id"], *range(40, 400, 4)})
    settings.write_text(json.dumps(known))
    return made


def keys_of(materials: Materials, folder: Path, *, declared: bool = True) -> tuple[str, ...]:
    """Write users and rows; return the keys of a run with them, apart from ``configured``'s."""
    folder.mkdir(exist_ok=True)
    notes = folder / "notes"
    notes.touch()
    (folder / "patient.py").write_text(USER.format(notes=str(notes)))
    (folder / "reward.py").write_text(REWARD)
    config = {"deterministic": True} if declared else {}
    users = [{"name": "patient", "class_name": "patient.Patient", "config": config}]
    (folder / "users.yaml").write_text(json.dumps({"interaction": users}))
    table = pq.read_table(materials.train)
    rows = [with_user(row) for row in table.to_pylist()]
    pq.write_table(type(table).from_pylist(rows), folder / "rows.parquet")
    return (
        f"data.train_files={folder / 'rows.parquet'}",
        "data.val_files=[]",
        "data.max_response_length=60",
        f"{ROLLOUT}.multi_turn.interaction_config_path={folder / 'users.yaml'}",
        f"{ROLLOUT}.agent.num_workers=2",
        f"{ROLLOUT}.full_determinism=True",
        f"custom_reward_function.path={folder / 'reward.py'}",
        "custom_reward_function.name=graded",
        f"trainer.total_training_steps={NUM_STEPS}",
        "trainer.save_freq=1",
        "trainer.device=cpu",
    )


def with_user(row: dict[str, Any]) -> dict[str, Any]:
    user = {"interaction_kwargs": {"name": "patient"}}
    return {**row, "agent_name": "tool_agent", "extra_info": {**row["extra_info"], **user}}


def weights_of(run: Path) -> dict[str, bytes]:
    folder = run / f"global_step_{NUM_STEPS}" / "actor"
    found = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.safe*")}
    assert found
    return found


def kill_after(command: Command, notes: Path, num_answers: int) -> bool:
    """Kill a run after some more answers; return False if it has ended before."""
    until = notes.stat().st_size + num_answers
    give_up_at_s = time.monotonic() + TIMEOUT_S
    while notes.stat().st_size < until and command.is_running:
        assert time.monotonic() < give_up_at_s, command.output()
        time.sleep(0.005)
    command.signal(signal.SIGKILL)
    ended = command.wait()
    assert ended.code in (0, -signal.SIGKILL), ended.stderr
    return ended.code != 0


@pytest.mark.parametrize(
    "num_kills", [1, pytest.param(10, marks=pytest.mark.deep, id="ten kill points")]
)
def test_m23_a_run_that_was_killed_ends_with_the_weights_of_one_that_was_not(
    materials: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_kills: int
) -> None:
    """The users take most of the time, so that most kills come while episodes wait for one."""
    monkeypatch.chdir(tmp_path)  # tools are imported from the working folder
    keys = keys_of(materials, tmp_path)
    train_on(configured(materials, tmp_path / "whole", *keys))
    notes = tmp_path / "notes"
    num_answers = notes.stat().st_size
    assert num_answers >= 2 * NUM_STEPS * 8, "there are several waves"
    draw = random.SystemRandom()
    num_killed = 0
    for number in range(4 * num_kills):
        run = tmp_path / f"killed-{number}"
        own = (
            f"actor_rollout_ref.model.path={materials.model}",
            "data.train_batch_size=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=4",
            f"{ROLLOUT}.n=2",
            "trainer.logger=[]",
            "trainer.resume_mode=auto",
            f"trainer.default_local_dir={run}",
        )
        words = ["train", GRPO, *own, *keys]
        # A run of three steps is killed once or twice: it goes on from its last checkpoint.
        while num_killed < num_kills and kill_after(
            Command(words, folder=tmp_path),
            notes,
            draw.randrange(1, num_answers * 2 // NUM_STEPS),
        ):
            num_killed += 1
        ended = Command(words, folder=tmp_path).wait()
        assert ended.code == 0, ended.stderr
        assert weights_of(run) == weights_of(tmp_path / "whole")
        if num_killed == num_kills:
            return
    pytest.fail("the runs end before they can be killed")


def test_what_is_not_declared_deterministic_is_refused(
    materials: Materials, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = keys_of(materials, tmp_path, declared=False)
    with pytest.raises(UserError, match=r"full_determinism=True: patient\.Patient may answer"):
        train.prepare(configured(materials, tmp_path / "run", *keys))
    tools = tmp_path / "tools.py"
    tools.write_text(CALCULATOR_FILE.read_text())
    own = f"{ROLLOUT}.multi_turn.function_tool_path"
    turns = (f"{ROLLOUT}.multi_turn.enable=True", f"{ROLLOUT}.full_determinism=True")
    with pytest.raises(UserError, match=r"write calculator\.is_deterministic = True below it"):
        train.prepare(configured(materials, tmp_path / "run", *turns, f"{own}={tools}"))
    declared = tmp_path / "declared.py"
    declared.write_text(f"{tools.read_text()}\n\ncalculator.is_deterministic = True\n")
    train.prepare(configured(materials, tmp_path / "run", *turns, f"{own}={declared}"))
    ahead = (
        "trainer.async_pipeline=True",
        "trainer.generate_ahead_steps=1",
        "actor_rollout_ref.hybrid_engine=False",
        "trainer.separated_node_tasks=[[actor-train,logp,ref_logp,generate]]",
        "trainer.separated_node_ratios=[1.0]",
        "trainer.device=cpu",
    )
    with pytest.raises(UserError, match=r"full_determinism=True: steps are generated ahead"):
        check_run(configured(materials, tmp_path / "run", *turns, f"{own}={declared}", *ahead))
