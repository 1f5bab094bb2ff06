# SPDX-License-Identifier: Apache-2.0
"""Runs in which workers that only generate are killed or stopped: others take their places, every
prompt is trained once, and the metrics are those of a run that nobody disturbed.
"""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.chaos.processes import MARK, dying, none_left
from tests.fakes.commands import Conditions, Ended, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

KEY = "actor_rollout_ref.rollout.max_engine_restarts"
SETTINGS = ("actor_rollout_ref.actor.ppo_mini_batch_size=2",)
"""Two optimizer steps a step, so that old log-probs are computed."""
TASKS = "trainer.separated_node_tasks=[[logp,ref_logp,actor-train],[generate]]"
SPLIT = ("trainer.n_gpus_per_node=3", TASKS, "trainer.separated_node_ratios=[0.34,0.66]")
"""One rank trains, two generate."""
HALVES = ("trainer.n_gpus_per_node=2", TASKS, "trainer.separated_node_ratios=[0.5,0.5]")
"""One rank trains, one generates."""
TIMEOUT_S = 60
"""Of collectives; a worker may give no sign of life for half of it."""


@pytest.fixture(scope="module")
def undisturbed(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ended = run_command(train_arguments(material, folder / "run", *SETTINGS), folder=folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


def disturbed(
    material: Material, folder: Path, death: dict[str, str], *keys: str, mark: str
) -> Ended:
    """Run with workers that die, in each of their processes, at one call."""
    arguments = train_arguments(material, folder / "run", *SETTINGS, *keys)
    conditions = Conditions(environment=death | {MARK: mark})
    return run_command(arguments, folder=folder, conditions=conditions)


def check_run(run: Path, undisturbed: Path) -> float:
    """Check that the run is that of one process. Return the number of workers replaced."""
    found, expected = metrics_of(run), metrics_of(undisturbed)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            # Sums over other batches of sequences are rounded differently.
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    return sum(row.get("rollout/engine/num_restarts", 0) for row in found.values())


@pytest.mark.parametrize(
    ("method", "number"),
    [("advance", 2), pytest.param("transfer", 3, marks=pytest.mark.deep)],
)
def test_a_killed_worker_is_replaced_and_the_run_is_the_undisturbed_one(
    undisturbed: Path, material: Material, tmp_path: Path, method: str, number: int
) -> None:
    """By SIGKILL within a call: the second worker dies, and each that takes its place."""
    mark = uuid.uuid4().hex
    death = dying("generate", 1, method, number)
    ended = disturbed(material, tmp_path, death, *SPLIT, f"{KEY}=8", mark=mark)
    assert ended.code == 0, ended.stderr
    assert check_run(tmp_path / "run", undisturbed) >= 2
    assert f"Another process takes its place (1 of {KEY}=8)" in ended.stderr
    assert "generate rank 1 (host " in ended.stderr and "Traceback" not in ended.stderr
    assert none_left(mark)


@pytest.mark.deep
def test_the_only_worker_that_generates_is_replaced_with_the_weights_in_use(
    undisturbed: Path, material: Material, tmp_path: Path
) -> None:
    """It dies in the third advance of each process: samples wait until the next one has weights."""
    mark = uuid.uuid4().hex
    death = dying("generate", 0, "advance", 3)
    ended = disturbed(material, tmp_path, death, *HALVES, f"{KEY}=8", mark=mark)
    assert ended.code == 0, ended.stderr
    assert check_run(tmp_path / "run", undisturbed) >= 1
    assert "was lost with the last worker" not in ended.stderr, "the trainer still had it"
    assert none_left(mark)


@pytest.mark.deep
def test_a_stopped_worker_is_killed_and_replaced(
    undisturbed: Path, material: Material, tmp_path: Path
) -> None:
    """By SIGSTOP within an advance: its heartbeat is missed, and it is gone at the end."""
    mark = uuid.uuid4().hex
    death = dying("generate", 1, "advance", 3, signal="SIGSTOP")
    keys = (f"actor_rollout_ref.nccl_timeout={TIMEOUT_S}", f"{KEY}=8")
    ended = disturbed(material, tmp_path, death, *SPLIT, *keys, mark=mark)
    assert ended.code == 0, ended.stderr
    assert check_run(tmp_path / "run", undisturbed) >= 1
    assert f"hangs in advance: no sign of life for {TIMEOUT_S / 2:g} s" in ended.stderr
    assert none_left(mark)


@pytest.mark.deep
def test_without_the_key_a_killed_worker_ends_the_run(material: Material, tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    ended = disturbed(material, tmp_path, dying("generate", 1, "advance", 2), *SPLIT, mark=mark)
    assert ended.code == 1
    (line,) = ended.errors
    assert line.startswith("error: step 1: generate rank 1 (host "), line
    assert none_left(mark)
