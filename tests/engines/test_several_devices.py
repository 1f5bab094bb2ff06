# SPDX-License-Identifier: Apache-2.0
"""Runs over several processes with vLLM in each: an engine that is split over the devices of a run
and shares them with the trainer, one that gets its weights from another process (V2), and engines
whose processes are killed or hang (V9, V11).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.processes import (
    MARK,
    MOST_SECONDS_TO_END,
    disturbing_steps,
    dying,
    none_left,
    wait_for_end,
    wait_for_place,
)
from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import Command, Conditions, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

ROLLOUT = "actor_rollout_ref.rollout"
SPLIT = (
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.free_cache_engine=True",
    "trainer.n_gpus_per_node=2",
)
PLACES = {
    "split over the devices of the trainer": SPLIT,
    "apart from the trainer": (
        f"{ROLLOUT}.name=vllm",
        "trainer.n_gpus_per_node=2",
        "trainer.separated_node_tasks=[[logp,actor-train],[generate]]",
        "trainer.separated_node_ratios=[0.5,0.5]",
    ),
}

STEP = 15
"""A step of vLLM within the first batch."""
HANGS_S = 4.0
"""The limit of a step; on a busy machine, 20 times the longest one may be more."""
TIMEOUT_S = 600.0


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads can be divided by two."""
    folder = tmp_path_factory.mktemp("policy")
    return write_tiny_policy(folder, size=replace(TINY, hidden=64, num_kv_heads=2))


def _arguments(material: Material, run: Path, policy: Path, *keys: str) -> list[str]:
    arguments = (
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=2",
        *keys,
    )
    return train_arguments(material, run, *arguments)


@pytest.fixture(scope="module")
def native(material: Material, policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the native engine, in one process."""
    folder = tmp_path_factory.mktemp("native")
    keys = (f"{ROLLOUT}.name=native",)
    ended = run_command(_arguments(material, folder / "run", policy, *keys), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


@pytest.mark.parametrize("place", PLACES)
def test_v8_and_v2_a_run_over_two_devices_is_that_of_the_native_engine(
    native: Path, material: Material, policy: Path, tmp_path: Path, place: str
) -> None:
    arguments = _arguments(material, tmp_path / "run", policy, *PLACES[place])
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    found = _check_run(tmp_path / "run", native)
    for step, row in found.items():
        if step > 0:
            assert row["training/rollout_logp_diff_max"] <= MAX_ERROR


def test_v9_a_killed_process_of_an_engine_ends_the_run_and_is_named(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """The other process of the engine waits for it within a step of vLLM, and is ended too."""
    mark, run, pool = uuid.uuid4().hex, tmp_path / "run", "actor-train+logp+generate"
    environment = dying(pool, 1, "advance", 2) | {MARK: mark}
    command = Command(
        _arguments(material, run, policy, *SPLIT),
        folder=tmp_path,
        conditions=Conditions(environment=environment),
    )
    place = wait_for_place(command, run, pool, rank=1)
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    assert ended.code == 1
    (line,) = ended.errors
    assert f"{pool} rank 1 (host {place['host']}, pid {place['pid']}) died in advance" in line
    assert none_left(mark)


def test_v9_and_v11_workers_that_are_killed_and_that_hang_are_replaced(
    native: Path, material: Material, policy: Path, tmp_path: Path
) -> None:
    """The first process with vLLM is killed within a batch, and a step of the second one hangs."""
    mark, happened = uuid.uuid4().hex, tmp_path / "happened"
    happened.mkdir()
    steps = disturbing_steps(happened, "kill", "hang", number=STEP, limit_s=HANGS_S)
    key = f"{ROLLOUT}.max_engine_restarts"
    arguments = _arguments(
        material, tmp_path / "run", policy, *PLACES["apart from the trainer"], f"{key}=8"
    )
    conditions = Conditions(environment=steps | {MARK: mark})
    ended = run_command(arguments, folder=tmp_path, conditions=conditions)
    assert ended.code == 0, ended.stderr
    assert {file.name for file in happened.iterdir()} == {"0.kill", "1.hang"}
    found = _check_run(tmp_path / "run", native)
    assert sum(row.get("rollout/engine/num_restarts", 0) for row in found.values()) == 2
    for number in (1, 2):
        assert f"Another process takes its place ({number} of {key}=8)" in ended.stderr
    assert "died in advance: vLLM: a step has not returned for" in ended.stderr
    assert none_left(mark)


def test_v11_a_step_that_hangs_in_a_run_of_one_process_is_named_and_ends_it(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    mark, happened = uuid.uuid4().hex, tmp_path / "happened"
    happened.mkdir()
    steps = disturbing_steps(happened, "hang", number=STEP, limit_s=HANGS_S)
    arguments = _arguments(material, tmp_path / "run", policy, f"{ROLLOUT}.name=vllm")
    ended = subprocess.run(
        [sys.executable, "-m", "tandem.cli.main", *arguments],
        check=False,
        capture_output=True,
        env=dict(os.environ) | steps | {MARK: mark},
        text=True,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    named, *stacks, said = ended.stderr.rpartition("warning: vLLM: ")[2].splitlines()
    limit = re.match(r"a step has not returned for \d+ s\. After (\d+) s, this process", named)
    assert limit is not None, ended.stderr
    assert any("in spin" in line for line in stacks), ended.stderr
    assert said == f"error: vLLM: a step has not returned for {limit[1]} s"
    assert none_left(mark)


def test_v9_no_worker_outlives_a_driver_that_is_killed_while_vllm_generates(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """The worker is within a step that does not return, so that it cannot be told."""
    mark, happened = uuid.uuid4().hex, tmp_path / "happened"
    happened.mkdir()
    steps = disturbing_steps(happened, "hang", number=STEP, limit_s=TIMEOUT_S)
    command = Command(
        _arguments(material, tmp_path / "run", policy, *PLACES["apart from the trainer"]),
        folder=tmp_path,
        conditions=Conditions(environment=steps | {MARK: mark}),
    )
    command.wait_for(happened / "0.hang")
    command.signal(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert none_left(mark)


def _check_run(run: Path, native: Path) -> dict[int, dict[str, float]]:
    """Check that a run is that of the native engine, and return its metrics."""
    found, expected = metrics_of(run), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    return found
