# SPDX-License-Identifier: Apache-2.0
"""A run of several processes of which one is killed: it ends at once, says who and when, leaves no
process behind, and the same command continues it as if nothing had happened.
"""

from __future__ import annotations

import os
import re
import signal
import time
import uuid
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path

import psutil
import pytest

from tests.chaos.processes import (
    MARK,
    MOST_SECONDS_TO_END,
    dying,
    none_left,
    wait_for_end,
    wait_for_place,
)
from tests.fakes.commands import Command, Conditions, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

SPLIT = (
    "trainer.n_gpus_per_node=3",
    "trainer.separated_node_tasks=[[logp,ref_logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.67,0.33]",
    "trainer.save_freq=1",
    "trainer.total_training_steps=4",
    "data.val_files=[]",
)
"""Two ranks train, one generates."""


@dataclass(frozen=True)
class Death:
    """Who dies in step 2, as which of its methods is called, and at which call of it."""

    pool: str
    rank: int
    method: str
    number: int


DEATHS = {
    "train": Death("actor-train", 1, "update", 2),
    # From here on the run begins with the checkpoint of step 1, and initial weights are sent first.
    "generate": Death("generate", 0, "advance", 1),
    "sync, the sender": Death("actor-train", 0, "transfer", 2),
    "sync, the receiver": Death("generate", 0, "transfer", 2),
    "save": Death("actor-train", 1, "save", 1),
}


@pytest.fixture(scope="module")
def whole(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    ended = run_command(train_arguments(material, folder / "run", *SPLIT), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


@pytest.mark.deep
def test_a_run_whose_worker_dies_starts_again_by_itself(
    whole: Path, material: Material, tmp_path: Path
) -> None:
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    arguments = train_arguments(material, run, *SPLIT, "trainer.max_restarts=2")
    environment = dying("actor-train", 1, "update", 3) | {MARK: mark}
    conditions = Conditions(environment=environment)
    ended = run_command(arguments, folder=tmp_path, conditions=conditions)
    assert ended.code == 0, ended.stderr
    (line,), (restart,) = ended.errors, read_lines(run / "restarts.jsonl")
    assert line == f"error: {restart['cause']}" and restart["step"] == 3
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole))
    for checkpoint in whole.glob("global_step_*"):
        for name in ("actor/__0_0.distcp", "actor/__1_0.distcp", "pipeline.json"):
            ours, theirs = (path / checkpoint.name / name for path in (run, whole))
            assert ours.read_bytes() == theirs.read_bytes(), f"{checkpoint.name}/{name} differs"
    assert none_left(mark)


@pytest.mark.deep
def test_12_and_23_a_run_that_dies_at_every_stage_is_the_run_that_never_did(
    whole: Path, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = train_arguments(material, run, *SPLIT)
    for stage, death in DEATHS.items():
        check_death(arguments, death, run=run, folder=tmp_path / stage)
    kill_the_driver(arguments, run=run, folder=tmp_path / "driver")
    stop_the_process_group(arguments, run=run, folder=tmp_path / "stopped")
    ended = run_command(arguments, folder=tmp_path / "last")
    assert ended.code == 0, ended.stderr
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(whole))


def check_death(arguments: list[str], death: Death, *, run: Path, folder: Path) -> None:
    """The run ends within seconds of the death and names it."""
    mark = uuid.uuid4().hex
    environment = dying(death.pool, death.rank, death.method, death.number) | {MARK: mark}
    command = Command(arguments, folder=folder, conditions=Conditions(environment=environment))
    place = wait_for_place(command, run, death.pool, rank=death.rank)
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    assert ended.code == 1
    (line,) = ended.errors
    who = f"{death.pool} rank {death.rank} (host {place['host']}, pid {place['pid']})"
    assert line.startswith(f"error: step 2: {who} "), line
    # The reply to the call before may be lost with the process: then it is the one named.
    assert re.search(f"died in (add|{death.method})", line), line
    assert none_left(mark)


def kill_the_driver(arguments: list[str], *, run: Path, folder: Path) -> None:
    """After step 2: nothing is left behind."""
    mark = uuid.uuid4().hex
    conditions = Conditions(environment={MARK: mark})
    command = Command(arguments, folder=folder, conditions=conditions)
    command.wait_for(run / "metrics.jsonl", text='"step": 2')
    command.signal(signal.SIGKILL)
    command.wait()
    assert none_left(mark)


def stop_the_process_group(arguments: list[str], *, run: Path, folder: Path) -> None:
    """By SIGTERM after step 3, as GNU timeout sends it to the whole group: it saves and leaves."""
    mark = uuid.uuid4().hex
    conditions = Conditions(environment={MARK: mark}, own_session=True)
    command = Command([*arguments, "trainer.save_freq=1000"], folder=folder, conditions=conditions)
    command.wait_for(run / "metrics.jsonl", text='"step": 3')
    os.killpg(command.pid, signal.SIGTERM)
    ended = command.wait()
    assert ended.code in (0, 128 + signal.SIGTERM), ended.stderr
    last = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert last == max(metrics_of(run)) >= 3
    assert none_left(mark)


def test_a_death_that_nobody_waits_for_ends_the_run_too(material: Material, tmp_path: Path) -> None:
    """A worker is killed while only a reward is being computed."""
    run = tmp_path / "run"
    reward, go = tmp_path / "reward.py", tmp_path / "go"
    reward.write_text(
        "import json, os, pathlib, signal, time\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if solution_str == ground_truth:\n"
        "        return 1.0  # the trial before the start\n"
        f"    places = json.loads(pathlib.Path({str(run)!r}, 'placement.json').read_text())\n"
        f"    while not os.path.exists({str(go)!r}):\n"
        "        time.sleep(0.01)\n"
        "    for place in places:\n"
        "        if place['tasks'] == ['generate']:\n"
        "            os.kill(place['pid'], signal.SIGKILL)\n"
        "    time.sleep(60)\n"
        "    return 0.0\n"
    )
    arguments = train_arguments(
        material,
        run,
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.hybrid_engine=False",
        "data.val_files=[]",
        f"custom_reward_function.path={reward}",
        "custom_reward_function.name=compute_score",
        "reward.timeout_s=100",
    )
    conditions = Conditions(environment={MARK: str(run)})
    command = Command(arguments, folder=tmp_path / "output", conditions=conditions)
    place = wait_for_place(command, run, "generate", rank=0)
    listeners = listening_addresses(command.pid)
    go.touch()
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    assert ended.code == 1
    assert ended.errors[0].startswith("error: step 1: generate rank 0 ")
    assert listeners, "the store of the run listens"
    assert all(not address.is_unspecified for address in listeners), listeners


def listening_addresses(pid: int) -> list[IPv4Address | IPv6Address]:
    """Return the addresses at which a process accepts connections."""
    found = psutil.Process(pid).net_connections("tcp")
    listening = [one for one in found if one.status == psutil.CONN_LISTEN]
    return [ip_address(one.laddr.ip) for one in listening]


def test_a_run_that_ends_before_anybody_can_die_tells_why(tmp_path: Path) -> None:
    command = Command(["train", "trainer.nnodes=two"], folder=tmp_path)
    with pytest.raises(AssertionError, match="trainer.nnodes='two': must be an integer"):
        wait_for_place(command, tmp_path, "generate", rank=0)


def test_a_mistake_that_a_worker_finds_is_no_reason_to_start_again(
    material: Material, tmp_path: Path
) -> None:
    """Only a worker reads the optimizer of a checkpoint."""
    run = tmp_path / "run"
    keys = (
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=1",
        "trainer.max_restarts=2",
        "data.val_files=[]",
    )
    arguments = train_arguments(material, run, *keys)
    assert run_command(arguments, folder=tmp_path).code == 0
    muon = "actor_rollout_ref.actor.optim.optimizer=Muon"
    other = [*arguments, "trainer.total_training_steps=2", muon]
    ended = run_command(other, folder=tmp_path)
    check_refusal(ended, "optimizer")
    assert not (run / "restarts.jsonl").exists()
