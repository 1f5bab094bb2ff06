# SPDX-License-Identifier: Apache-2.0
"""V9: a worker with vLLM is killed while it is idle, prefills, decodes, takes weights in, and
between the last weight and the end of an update. V11: a step of a worker hangs. V2: weights come
from another process.
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
    disturbing_steps,
    none_left,
    wait_for_end,
    wait_for_place,
)
from tests.engines.bench import MAX_ERROR
from tests.fakes.commands import Command, Conditions, run_command
from tests.fakes.tiny_policy import TINY, write_tiny_policy
from tests.fakes.tiny_run import Material, metrics_of, read_lines, repeatable, train_arguments

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

POINTS = ("prefill", "kill", "take", "end", "idle")
"""``kill`` is within a decode step."""
KEY = "actor_rollout_ref.rollout.max_engine_restarts"
APART = (
    "trainer.n_gpus_per_node=2",
    "trainer.separated_node_tasks=[[logp,actor-train],[generate]]",
    "trainer.separated_node_ratios=[0.5,0.5]",
)
STEP = 15
"""The step of vLLM in which ``kill`` happens."""
LIMIT_S = 600.0
TIMEOUT_S = 3600.0
"""Six processes with vLLM start one after the other."""
HANGS_S = 4.0
"""The limit of a step where one hangs; on a busy machine, 20 times the longest one may be more."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_policy(tmp_path_factory.mktemp("policy"), size=replace(TINY, hidden=64))


def _arguments(material: Material, run: Path, policy: Path, *keys: str) -> list[str]:
    return train_arguments(
        material,
        run,
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "trainer.total_training_steps=4",
        *keys,
    )


def _conditions(folder: Path, *points: str, mark: str, limit_s: float = LIMIT_S) -> Conditions:
    folder.mkdir()
    disturbed = disturbing_steps(folder, *points, number=STEP, limit_s=limit_s)
    return Conditions(environment=disturbed | {MARK: mark})


@pytest.mark.deep
@pytest.mark.parametrize("point", POINTS)
def test_v9_a_worker_that_is_killed_ends_the_run_and_is_named(
    material: Material, policy: Path, tmp_path: Path, point: str
) -> None:
    """The driver ends the run, whatever the engine (``tests/chaos/test_killed_workers.py``), and
    ``test_several_devices`` kills a process with vLLM in such a run.
    """
    mark, run = uuid.uuid4().hex, tmp_path / "run"
    command = Command(
        _arguments(material, run, policy, "actor_rollout_ref.rollout.name=vllm", *APART),
        folder=tmp_path,
        conditions=_conditions(tmp_path / "happened", point, mark=mark),
    )
    place = wait_for_place(command, run, "generate", rank=0)
    wait_for_end(place["pid"])
    died_s = time.monotonic()
    ended = command.wait()
    assert time.monotonic() - died_s < MOST_SECONDS_TO_END
    assert (tmp_path / f"happened/0.{point}").exists()
    assert ended.code == 1
    (line,) = ended.errors
    assert f"generate rank 0 (host {place['host']}, pid {place['pid']}) died" in line
    assert "Traceback" not in ended.stderr
    assert none_left(mark)


def test_v9_and_v11_workers_that_are_killed_at_every_point_or_hang_are_replaced(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """One process after the other is killed, or hangs in a step. Every prompt is trained once, with
    the samples of the native engine.
    """
    points = ("prefill", "kill", "hang", "take", "end", "idle")
    mark, native = uuid.uuid4().hex, tmp_path / "native"
    keys = ("actor_rollout_ref.rollout.name=native",)
    undisturbed = run_command(_arguments(material, native, policy, *keys), folder=tmp_path)
    assert undisturbed.code == 0, undisturbed.stderr
    keys = ("actor_rollout_ref.rollout.name=vllm", f"{KEY}=8", *APART)
    run, happened = tmp_path / "run", tmp_path / "happened"
    ended = run_command(
        _arguments(material, run, policy, *keys),
        folder=tmp_path / "disturbed",
        conditions=_conditions(happened, *points, mark=mark, limit_s=HANGS_S),
        timeout_s=TIMEOUT_S,
    )
    assert ended.code == 0, ended.stderr
    expected_files = {f"{index}.{point}" for index, point in enumerate(points)}
    assert {file.name for file in happened.iterdir()} == expected_files
    found, expected = metrics_of(run), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    for step, row in found.items():
        if step > 0:
            assert row["training/rollout_logp_diff_max"] <= MAX_ERROR
    assert "died in advance: vLLM: a step has not returned for" in ended.stderr
    assert _trained(run) == _trained(native)
    for number in range(1, len(points) + 1):
        assert f"Another process takes its place ({number} of {KEY}=8)" in ended.stderr
    assert none_left(mark)


def _trained(run: Path) -> dict[int, list[str]]:
    """Return the responses that were trained in each step, by the record of the run."""
    trained: dict[int, list[str]] = {}
    for record in read_lines(run / "rollouts.jsonl"):
        trained.setdefault(record["step"], []).append(record["response"])
    return {step: sorted(responses) for step, responses in trained.items()}
