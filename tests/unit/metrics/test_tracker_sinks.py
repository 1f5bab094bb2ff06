# SPDX-License-Identifier: Apache-2.0
"""MLflow and SwanLab through stand-ins for their packages, which need not be installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tandem.errors import UserError
from tandem.metrics.mlflow_sink import MlflowSink, allowed_name
from tandem.metrics.swanlab_sink import SwanlabSink
from tandem.types import StepReport

CONFIG = {"data": {"train_batch_size": 8}, "trainer": {"logger": ["mlflow"], "nothing": {}}}


class RefusedError(Exception):
    """What the stand-in of MLflow raises."""


class Client:
    """A stand-in for MLflow's client that keeps one experiment and its runs."""

    logged: list[Any]
    ended: list[str]

    def get_experiment_by_name(self, name: str) -> SimpleNamespace | None:
        if name == "refused":
            raise RefusedError("no\nserver")
        return SimpleNamespace(experiment_id="known") if name == "known" else None

    def create_experiment(self, name: str) -> str:
        return f"created {name}"

    def create_run(self, experiment_id: str, *, run_name: str) -> SimpleNamespace:
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{run_name} in {experiment_id}"))

    def log_batch(self, run: str, *, metrics: Sequence[Any] = (), params: Sequence[Any] = ()):
        if any(name == "broken" for name, *_ in metrics):
            raise RefusedError("no connection")
        assert len(metrics) <= 1000 and len(params) <= 100
        self.logged.append((run, [*metrics, *params]))

    def set_terminated(self, run: str) -> None:
        self.ended.append(run)


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    """The client of the stand-in."""
    client = type("FreshClient", (Client,), {"logged": [], "ended": []})
    package: Any = ModuleType("mlflow")
    package.MlflowClient, package.MlflowException = client, RefusedError
    package.entities = SimpleNamespace(
        Metric=lambda name, value, time_ms, step: (name, value, step),
        Param=lambda name, value: (name, value),
    )
    monkeypatch.setitem(sys.modules, "mlflow", package)
    return client


@pytest.mark.parametrize(("project", "number"), [("known", "known"), ("p", "created p")])
def test_mlflow_gets_the_config_and_the_metrics(
    project: str, number: str, tmp_path: Path, mlflow: type[Client]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sink = MlflowSink(tmp_path, project=project, experiment="e")
    sink.write(StepReport(2, {"val-core/some/acc/mean@4": 0.5}))
    sink.close()
    run = f"e in {number}"
    values = [
        ("data.train_batch_size", "8"),
        ("trainer.logger", "['mlflow']"),
        ("trainer.nothing", "{}"),
    ]
    assert mlflow.logged == [(run, values), (run, [("val-core/some/acc/mean_at_4", 0.5, 2)])]
    assert mlflow.ended == [run]


def test_failures_of_mlflow(tmp_path: Path, mlflow: type[Client]) -> None:
    with pytest.raises(UserError, match=r"MLflow cannot start \(no server\)"):
        MlflowSink(tmp_path, project="refused", experiment="e")
    sink = MlflowSink(tmp_path, project="p", experiment="e")
    with pytest.raises(OSError, match="no connection"):
        sink.write(StepReport(1, {"broken": 1.0}))


def test_many_metrics_are_several_calls(tmp_path: Path, mlflow: type[Client]) -> None:
    sink = MlflowSink(tmp_path, project="p", experiment="e")
    sink.write(StepReport(1, {f"m{i}": 1.0 for i in range(2500)}))
    assert [len(some) for _, some in mlflow.logged] == [1000, 1000, 500]


def test_names_that_mlflow_refuses_are_changed() -> None:
    assert allowed_name("val-core/a b.c:d/acc/best@4/mean") == "val-core/a b.c:d/acc/best_at_4/mean"
    assert allowed_name("reward/sch\u00f6n|x") == "reward/sch_n_x"


def test_swanlab_gets_the_config_and_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    calls: list[Any] = []

    def init(**settings: Any) -> SimpleNamespace:
        if settings["project"] == "refused":
            raise KeyError("no login")
        calls.append(settings)
        return SimpleNamespace(
            log=lambda metrics, step: calls.append((step, metrics)),
            finish=lambda: calls.append("finished"),
        )

    package: Any = ModuleType("swanlab")
    package.init = init
    monkeypatch.setitem(sys.modules, "swanlab", package)
    sink = SwanlabSink(tmp_path, project="p", experiment="e")
    sink.write(StepReport(2, {"critic/score/mean": 0.5}))
    sink.close()
    assert calls == [
        {"project": "p", "experiment_name": "e", "logdir": str(tmp_path), "config": CONFIG},
        (2, {"critic/score/mean": 0.5}),
        "finished",
    ]
    with pytest.raises(UserError, match=r"SwanLab cannot start \('no login'\)"):
        SwanlabSink(tmp_path, project="refused", experiment="e")
