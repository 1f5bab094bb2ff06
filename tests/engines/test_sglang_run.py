# SPDX-License-Identifier: Apache-2.0
"""Runs of one and of several processes that generate with SGLang: they are runs of the native
engine, also if processes are killed, and leave no process.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tests.chaos.processes import MARK, none_left, processes_with, wait_for_place
from tests.engines.groups import ends
from tests.fakes.commands import TIMEOUT_S, Command, Conditions, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

PYTHON = os.environ.get("TANDEM_SGLANG_PYTHON", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="needs sglang: make test-engines")

SGLANG = "sglang"
KWARGS = "actor_rollout_ref.rollout.engine_kwargs.sglang"
SIZE = replace(TINY, hidden=64, num_kv_heads=2)


PLACES = {
    "on the device of the trainer": (),
    "on both devices of the trainer": ("trainer.n_gpus_per_node=2",),
}
APART = (
    "trainer.n_gpus_per_node=2",
    "trainer.separated_node_tasks=[[logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
)
RESTARTS = "actor_rollout_ref.rollout.max_engine_restarts"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("policy"), size=SIZE)


def _arguments(
    material: Material, run: Path, policy: Path, *keys: str, name: str = SGLANG
) -> list[str]:
    given = (
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.rollout.name={name}",
        f"{KWARGS}.python={PYTHON}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.device=cpu",
        "trainer.total_training_steps=3",
        *keys,
    )
    return train_arguments(material, run, *given)


@pytest.fixture(scope="module")
def native(material: Material, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the native engine, in one process."""
    folder = tmp_path_factory.mktemp("native")
    arguments = _arguments(material, folder / "run", policy, name="native")
    ended = run_command(arguments, folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


def _check_run(run: Path, native: Path) -> dict[int, dict[str, float]]:
    """Check that a run is that of the native engine, and return its metrics."""
    found, expected = metrics_of(run), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    for row in list(found.values())[1:]:
        assert row["training/rollout_logp_diff_max"] < 1e-4
    return found


@pytest.mark.parametrize("place", PLACES)
def test_a_run_with_sglang_is_that_of_the_native_engine(
    native: Path, material: Material, policy: Path, tmp_path: Path, place: str
) -> None:
    """What SGLang and its packages print is not among the messages of the run."""
    mark = uuid.uuid4().hex
    arguments = _arguments(material, tmp_path / "run", policy, *PLACES[place])
    conditions = Conditions(environment={MARK: mark})
    ended = run_command(arguments, folder=tmp_path, conditions=conditions)
    assert ended.code == 0, ended.stderr
    _check_run(tmp_path / "run", native)
    own = ("tandem ", "INFO tandem.", "WARNING tandem.")
    assert [line for line in ended.stderr.splitlines() if not line.startswith(own)] == []
    assert none_left(mark)


def test_v10_a_scheduler_and_a_worker_that_are_killed_are_replaced(
    native: Path, material: Material, policy: Path, tmp_path: Path
) -> None:
    """Each is killed after a step, whatever it does then. Every prompt is trained once."""
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    command = Command(
        _arguments(material, run, policy, *APART, f"{RESTARTS}=4"),
        folder=tmp_path,
        conditions=Conditions(environment={MARK: mark}),
    )
    worker = wait_for_place(command, run, "generate", rank=0)["pid"]
    command.wait_for(run / "metrics.jsonl", text='"step": 0')
    first, scheduler = _sglang_of(mark)
    scheduler.kill()
    command.wait_for(run / "metrics.jsonl", text='"step": 1')
    second, _ = _sglang_of(mark)
    os.kill(worker, signal.SIGKILL)
    assert ends(second)
    ended = command.wait()
    assert ended.code == 0, ended.stderr
    found = _check_run(run, native)
    assert max(row.get("rollout/engine/num_restarts", 0) for row in found.values()) >= 1
    assert "SGLang: process killed by SIGKILL" in ended.stderr
    assert f"It is started again (1 of {RESTARTS}=4)" in ended.stderr
    assert f"Another process takes its place (1 of {RESTARTS}=4)" in ended.stderr
    assert ends(first) and none_left(mark)


def _sglang_of(mark: str) -> tuple[int, psutil.Process]:
    """Return SGLang's process group in a run, and its scheduler, which changes its environment."""
    (engine,) = _programs_of(mark)
    found: list[psutil.Process] = []
    for child in engine.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [child] if "sglang::scheduler" in " ".join(child.cmdline()) else []
    (scheduler,) = found
    return engine.pid, scheduler


@pytest.mark.parametrize("part", ["scheduler", "engine"])
def test_v10_a_killed_process_of_sglang_ends_the_run_and_is_named(
    material: Material, policy: Path, tmp_path: Path, part: str
) -> None:
    """In a run of one process without restarts. ``engine`` is the scheduler's parent."""
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    command = Command(
        _arguments(material, run, policy, "trainer.total_training_steps=200"),
        folder=tmp_path,
        conditions=Conditions(environment={MARK: mark}),
    )
    command.wait_for(run / "metrics.jsonl", text='"step": 1')
    group, scheduler = _sglang_of(mark)
    os.kill(scheduler.pid if part == "scheduler" else group, signal.SIGKILL)
    ended = command.wait()
    assert ended.code == 1
    (line,) = ended.errors
    assert "SGLang: process killed by SIGKILL" in line
    assert "Traceback" not in ended.stderr
    assert ends(group) and none_left(mark)


@pytest.mark.parametrize("is_early", [True, False], ids=["while SGLang starts", "after a step"])
def test_v10_a_killed_run_leaves_no_process_and_no_file_of_sglang(
    material: Material, policy: Path, tmp_path: Path, is_early: bool
) -> None:
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    command = Command(
        _arguments(material, run, policy, "trainer.total_training_steps=200"),
        folder=tmp_path,
        conditions=Conditions(environment={MARK: mark}),
    )
    _wait_for(lambda: _programs_of(mark))
    (engine,) = _programs_of(mark)
    found = re.search(r'[^"]*/tandem-sglang-[^"/]*', " ".join(engine.cmdline()))
    assert found is not None, engine.cmdline()
    folder, log = Path(found[0]), Path(f"/proc/{engine.pid}/fd/2").readlink()
    if is_early:
        _wait_for(lambda: list(folder.glob("tmp*")))
    else:
        command.wait_for(run / "metrics.jsonl", text='"step": 1')
    assert folder.exists() and log.exists()
    command.signal(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert none_left(mark)
    _wait_for(lambda: not folder.exists() and not log.exists())


def _programs_of(mark: str) -> list[psutil.Process]:
    """Return the processes of a run that hold SGLang's engine."""
    found: dict[int, tuple[psutil.Process, int]] = {}
    for process in processes_with(mark):
        with suppress(psutil.NoSuchProcess):  # short programs that SGLang starts
            if "tandem.rollout.sglang.program" in process.cmdline():
                found[process.pid] = (process, process.ppid())
    return [process for process, parent in found.values() if parent not in found]


def _wait_for(holds: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
