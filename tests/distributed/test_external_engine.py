# SPDX-License-Identifier: Apache-2.0
"""Runs with a rollout engine that is outside of tandem, named by its dotted path: it has a process
and weights of its own, and the runs are those with our engine.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.api import EngineFailure, RolloutEngine
from tandem.rollout.factory import EngineSpec
from tests.fakes.commands import Conditions, Ended, run_command
from tests.fakes.external_engine import ROOT, ExternalEngine
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

SETTINGS = (
    "trainer.total_training_steps=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
)
"""Two optimizer steps a step, for which the trainer scores the batch itself."""

PLACES = {
    "one process": (),
    "two devices": (
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.rollout.free_cache_engine=True",
    ),
    "two pools": (
        "trainer.n_gpus_per_node=2",
        "trainer.separated_node_tasks=[[actor-train],[logp,generate]]",
        "trainer.separated_node_ratios=[0.5,0.5]",
    ),
}


class DyingEngine(ExternalEngine):
    """Loses its process when the second version of the weights comes."""

    def begin(self, version: int) -> None:
        """Begin a version, or lose the process."""
        if version == 1:
            self._process.kill()
        super().begin(version)


def build_dying(spec: EngineSpec) -> RolloutEngine:
    """Build an engine that dies."""
    return DyingEngine(spec)


class MortalEngine(ExternalEngine):
    """Loses its process in a call. Each engine of a process dies in another one."""

    calls = iter(("advance", "take"))

    def __init__(self, spec: EngineSpec) -> None:
        self._last_call = next(self.calls, "")
        super().__init__(spec)

    def _call(self, method: str, *args: object) -> Any:
        if method == self._last_call:
            self._process.kill()
        return super()._call(method, *args)


def build_mortal(spec: EngineSpec) -> RolloutEngine:
    """Build an engine that dies."""
    return MortalEngine(spec)


def build_refusing(spec: EngineSpec) -> RolloutEngine:
    """Refuse to build an engine."""
    raise EngineFailure(f"no engine for {spec.folder.name}")


def _train(material: Material, folder: Path, *arguments: str) -> Ended:
    conditions = Conditions(environment={"PYTHONPATH": str(ROOT)})
    command = train_arguments(material, folder / "run", *SETTINGS, *arguments)
    return run_command(command, folder=folder, conditions=conditions)


def _engine(name: str) -> str:
    return f"actor_rollout_ref.rollout.name={name}"


@pytest.fixture(scope="module")
def native(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with our engine."""
    folder = tmp_path_factory.mktemp("native")
    ended = _train(material, folder)
    assert ended.code == 0, ended.stderr
    return folder / "run"


@pytest.mark.parametrize(
    "place",
    [
        "one process",
        pytest.param("two devices", marks=pytest.mark.deep),
        pytest.param("two pools", marks=pytest.mark.deep),
    ],
)
def test_an_external_engine_trains_as_ours_does(
    native: Path, material: Material, tmp_path: Path, place: str
) -> None:
    name = "tests.fakes.external_engine:build"
    ended = _train(material, tmp_path, _engine(name), *PLACES[place])
    assert ended.code == 0, ended.stderr
    found, expected = metrics_of(tmp_path / "run"), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    last = found[max(found)]
    assert last["training/rollout_probs_diff_max"] < 1e-5
    assert last["rollout/engine/num_decoded_tokens"] == pytest.approx(num_response_tokens(last))


def test_counters_of_our_engine_are_logged(native: Path) -> None:
    rows = metrics_of(native)
    for step, row in rows.items():
        if step > 0:
            assert row["rollout/engine/num_decoded_tokens"] > 0
            assert row["rollout/engine/num_prefilled_tokens"] > 0


def num_response_tokens(row: dict[str, float]) -> float:
    """Return the response tokens of a step of 16 samples."""
    return 16 * row["response_length/mean"]


@pytest.mark.parametrize(
    "place", ["one process", pytest.param("two devices", marks=pytest.mark.deep)]
)
def test_an_engine_whose_process_dies_ends_the_run_with_one_line(
    material: Material, tmp_path: Path, place: str
) -> None:
    name = "tests.distributed.test_external_engine:build_dying"
    ended = _train(material, tmp_path, _engine(name), *PLACES[place])
    assert ended.code == 1
    assert "Traceback" not in ended.stderr
    (error,) = ended.errors
    assert "the external engine's process ended with code -9" in error


@pytest.mark.parametrize(
    ("place", "num_engines"),
    [
        ("one process", 1),
        pytest.param("two devices", 2, marks=pytest.mark.deep),
        pytest.param("two pools", 1, marks=pytest.mark.deep),
    ],
)
def test_an_engine_that_dies_is_started_again_and_the_run_is_that_of_our_engine(
    native: Path, material: Material, tmp_path: Path, place: str, num_engines: int
) -> None:
    """The engine of each process that generates dies twice."""
    name = "tests.distributed.test_external_engine:build_mortal"
    allowed = "actor_rollout_ref.rollout.max_engine_restarts=2"
    ended = _train(material, tmp_path, _engine(name), allowed, *PLACES[place])
    assert ended.code == 0, ended.stderr
    found, expected = metrics_of(tmp_path / "run"), metrics_of(native)
    for step, row in repeatable(expected).items():
        for metric, value in row.items():
            assert found[step][metric] == pytest.approx(value, abs=1e-4), (step, metric)
    num_restarts = sum(row.get("rollout/engine/num_restarts", 0) for row in found.values())
    assert num_restarts == 2 * num_engines
    told = "the external engine's process ended with code -9. It is started again (1 of "
    assert told in ended.stderr


def test_an_engine_that_cannot_be_built_ends_the_run_with_one_line(
    material: Material, tmp_path: Path
) -> None:
    name = "tests.distributed.test_external_engine:build_refusing"
    ended = _train(material, tmp_path, _engine(name))
    assert ended.errors == ["error: no engine for policy"]


def test_a_path_without_a_function_is_refused(material: Material, tmp_path: Path) -> None:
    ended = _train(material, tmp_path, _engine("tests.fakes.external_engine:nothing"))
    assert ended.code == 2
    (error,) = ended.errors
    assert "has no attribute 'nothing'" in error
