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
APART = (
    f"{ROLLOUT}.name=vllm",
    "trainer.n_gpus_per_node=2",
    "trainer.separated_node_tasks=[[logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
)

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


def test_v8_a_run_with_an_engine_over_two_devices_is_that_of_the_native_engine(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """A run in which another process generates is in ``test_killed_workers``."""
    native, run = tmp_path / "native/run", tmp_path / "run"
    keys = (f"{ROLLOUT}.name=native",)
    ended = run_command(_arguments(material, native, policy, *keys), folder=native.parent)
    assert ended.code == 0, ended.stderr
    ended = run_command(_arguments(material, run, policy, *SPLIT), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    found, expected = metrics_of(run), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
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
    # The call that the driver waits for is the step, or samples that are added before it.
    named = f"{pool} rank 1 (host {place['host']}, pid {place['pid']}) died in "
    assert f"{named}advance" in line or f"{named}add" in line
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
        _arguments(material, tmp_path / "run", policy, *APART),
        folder=tmp_path,
        conditions=Conditions(environment=steps | {MARK: mark}),
    )
    command.wait_for(happened / "0.hang")
    command.signal(signal.SIGKILL)
    assert command.wait().code == -signal.SIGKILL
    assert none_left(mark)
