# SPDX-License-Identifier: Apache-2.0
"""Runs over several processes with vLLM in each: an engine that is split over the devices of a run
and shares them with the trainer, one that gets its weights from another process (V2), and one of
whose processes is killed (V9).
"""

from __future__ import annotations

import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.processes import (
    MARK,
    MOST_SECONDS_TO_END,
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
    found, expected = metrics_of(tmp_path / "run"), metrics_of(native)
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
    assert f"{pool} rank 1 (host {place['host']}, pid {place['pid']}) died in advance" in line
    assert none_left(mark)
