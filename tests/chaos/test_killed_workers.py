# SPDX-License-Identifier: Apache-2.0
"""A run of several processes of which one is killed: it ends at once, says who and when, leaves no
process behind, and the same command continues it as if nothing had happened.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from tests.fakes.commands import Command, Conditions, Ended, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

DYING = Path(__file__).resolve().parents[1] / "fakes/dying"
MARK = "TANDEM_TEST_MARK"
MOST_SECONDS_TO_END = 10
SPLIT = (
    "trainer.n_gpus_per_node=3",
    "trainer.separated_node_tasks=[[logp,ref_logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.67,0.33]",
    "trainer.save_freq=1",
    "trainer.total_training_steps=3",
    "data.val_files=[]",
)
"""Two ranks train, one generates."""

STAGES = {
    "generate": ("generate", 0, "advance"),
    "train": ("actor-train", 1, "update"),
    "sync, the sender": ("actor-train", 0, "transfer"),
    "sync, the receiver": ("generate", 0, "transfer"),
    "save": ("actor-train", 1, "save"),
}
"""Who dies, as which of its methods is called."""


@pytest.fixture(scope="module")
def whole_run(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    arguments = train_arguments(material, folder / "run", *SPLIT)
    assert run_command(arguments, folder=folder).code == 0
    return folder / "run"


def processes_with(mark: str) -> list[psutil.Process]:
    """All that were started in an environment with ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def none_left(mark: str, *, within_s: float) -> bool:
    """Whether all processes of a run end in time."""
    deadline = time.monotonic() + within_s
    while processes_with(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def resume(arguments: list[str], folder: Path) -> Ended:
    """The same command again, left alone."""
    ended = run_command(arguments, folder=folder)
    assert ended.code == 0, ended.stderr
    return ended


@pytest.mark.parametrize("stage", STAGES)
def test_a_killed_worker_ends_the_run_which_resumes_where_it_was(
    material: Material, whole_run: Path, tmp_path: Path, stage: str
) -> None:
    pool, rank, method = STAGES[stage]
    mark = uuid.uuid4().hex
    number = {"advance": 3, "transfer": 3}.get(method, 2)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(DYING), *os.environ.get("PYTHONPATH", "").split(":")]),
        "TANDEM_TEST_DIE": f"{pool}:{rank}:{method}:{number}",
        MARK: mark,
    }
    arguments = train_arguments(material, tmp_path / "run", *SPLIT)
    ended = run_command(
        arguments, folder=tmp_path / "killed", conditions=Conditions(environment=environment)
    )
    (line,) = ended.errors
    assert ended.code == 1
    # The third transfer is that of step 2: the first one brings the initial weights.
    step = r"\d" if method == "advance" else "2"
    assert re.match(rf"error: step {step}: {pool} rank {rank} ", line), line
    # The reply to the call before may be lost with the process: then it is the one named.
    assert re.search(f"died in ({'add|' * (method == 'advance')}{method})", line), line
    assert none_left(mark, within_s=2)
    resume(arguments, tmp_path / "resumed")
    assert repeatable(metrics_of(tmp_path / "run")) == repeatable(metrics_of(whole_run))


def test_the_run_ends_within_seconds_of_the_death(material: Material, tmp_path: Path) -> None:
    """Killed from outside in the middle of generation, while the trainer waits for it."""
    mark = uuid.uuid4().hex
    run = tmp_path / "run"
    arguments = train_arguments(
        material,
        run,
        *SPLIT,
        "trainer.total_training_steps=10",
        "data.max_response_length=150",
        "actor_rollout_ref.rollout.ignore_eos=True",
    )
    conditions = Conditions(environment={MARK: mark})
    command = Command(arguments, folder=tmp_path / "output", conditions=conditions)
    command.wait_for(run / "metrics.jsonl", text='"step": 1')
    records = json.loads((run / "placement.json").read_text())
    (generating,) = [record for record in records if record["tasks"] == ["generate"]]
    os.kill(generating["pid"], signal.SIGKILL)
    killed_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - killed_s < MOST_SECONDS_TO_END
    assert ended.code == 1
    assert (
        f"generate rank 0 (host {generating['host']}, pid {generating['pid']})" in ended.errors[0]
    )
    assert none_left(mark, within_s=2)


def test_a_death_that_nobody_waits_for_ends_the_run_too(material: Material, tmp_path: Path) -> None:
    """A worker is killed while only a reward is being computed."""
    run = tmp_path / "run"
    reward = tmp_path / "reward.py"
    reward.write_text(
        "import json, os, pathlib, signal, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        f"    places = json.loads(pathlib.Path({str(run)!r}, 'placement.json').read_text())\n"
        "    for place in places:\n"
        "        if place['tasks'] == ['generate']:\n"
        "            os.kill(place['pid'], signal.SIGKILL)\n"
        "    time.sleep(60)\n"
        "    return 0.0\n"
    )
    arguments = train_arguments(
        material,
        run,
        *SPLIT,
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=compute_score",
        "reward.timeout_s=100",
    )
    command = Command(arguments, folder=tmp_path / "output")
    command.wait_for(run / "placement.json")
    started_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - started_s < 30
    assert ended.code == 1
    assert ended.errors[0].startswith("error: step 1: generate rank 0 ")


def test_a_killed_driver_leaves_no_process_behind(material: Material, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    arguments = train_arguments(
        material, tmp_path / "run", *SPLIT, "trainer.total_training_steps=10"
    )
    conditions = Conditions(environment={MARK: mark})
    command = Command(arguments, folder=tmp_path / "output", conditions=conditions)
    command.wait_for(tmp_path / "run/metrics.jsonl", text='"step": 1')
    command.signal(signal.SIGKILL)
    command.wait()
    assert none_left(mark, within_s=MOST_SECONDS_TO_END)


def test_sigterm_saves_and_leaves(material: Material, whole_run: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = train_arguments(material, run, *SPLIT, "trainer.save_freq=100")
    command = Command(arguments, folder=tmp_path / "stopped")
    command.wait_for(run / "metrics.jsonl", text='"step": 1')
    command.signal(signal.SIGTERM)
    ended = command.wait()
    assert ended.code in (0, 128 + signal.SIGTERM), ended.stderr
    resume(arguments, tmp_path / "resumed")
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole_run))


def test_sigterm_to_the_whole_process_group_saves_and_leaves(
    material: Material, tmp_path: Path
) -> None:
    """As GNU timeout sends it."""
    mark = uuid.uuid4().hex
    run = tmp_path / "run"
    arguments = train_arguments(
        material,
        run,
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=1000",
        "trainer.total_training_steps=1000",
        "trainer.total_epochs=1000",
        "data.val_files=[]",
    )
    with (tmp_path / "stderr.txt").open("w") as stderr:
        command = subprocess.Popen(
            [sys.executable, "-m", "tandem.cli.main", *arguments],
            env=os.environ | {MARK: mark},
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and '"step": 1' in metrics.read_text()):
        assert command.poll() is None and time.monotonic() < deadline, (
            tmp_path / "stderr.txt"
        ).read_text()
        time.sleep(0.05)
    os.killpg(command.pid, signal.SIGTERM)
    code = command.wait(60)
    assert code in (0, 128 + signal.SIGTERM), (tmp_path / "stderr.txt").read_text()
    assert list(run.glob("global_step_*"))
    assert none_left(mark, within_s=MOST_SECONDS_TO_END)
