# SPDX-License-Identifier: Apache-2.0
"""W&B through a stand-in for its package, which need not be installed."""

import json
import sys
from types import ModuleType

import pytest

from tandem.errors import UserError
from tandem.metrics.wandb_sink import WandbSink
from tandem.types import StepReport


class _WandbError(Exception):
    pass


class _FakeRun:
    def __init__(self, settings):
        self.settings = settings
        self.logged = []
        self.finished = False

    def define_metric(self, name, *, step_metric):
        self.axes = {name: step_metric}

    def log(self, metrics):
        if "broken" in metrics:
            raise _WandbError("no connection")
        self.logged.append(metrics)

    def finish(self):
        self.finished = True


@pytest.fixture
def wandb_runs(monkeypatch):
    runs = []

    def init(**settings):
        if settings["project"] == "refused":
            raise _WandbError("no API key")
        runs.append(_FakeRun(settings))
        return runs[-1]

    package = ModuleType("wandb")
    package.Error = _WandbError
    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    return runs


def test_a_run_carries_the_config_and_the_metrics(tmp_path, wandb_runs):
    (tmp_path / "config.json").write_text(json.dumps({"data": {"train_batch_size": 8}}))
    sink = WandbSink(tmp_path, project="p", experiment="e")
    sink.write(StepReport(2, {"critic/score/mean": 0.5}))
    sink.write(StepReport(1, {"val-core/some/acc/mean@1": 0.25}))
    sink.close()

    (run,) = wandb_runs
    assert run.settings["project"] == "p"
    assert run.settings["name"] == "e"
    assert run.settings["config"] == {"data": {"train_batch_size": 8}}
    assert run.axes == {"*": "training/global_step"}
    assert run.logged == [
        {"critic/score/mean": 0.5, "training/global_step": 2},
        {"val-core/some/acc/mean@1": 0.25, "training/global_step": 1},
    ]
    assert run.finished


def test_its_failures_come_as_oserror(tmp_path, wandb_runs):
    sink = WandbSink(tmp_path, project="p", experiment="e")

    with pytest.raises(OSError, match="no connection"):
        sink.write(StepReport(1, {"broken": 1.0}))
    assert len(wandb_runs) == 1


def test_a_start_without_an_api_key_is_an_error(tmp_path, wandb_runs):
    with pytest.raises(UserError, match="trainer.logger='wandb'.*no API key.*WANDB_MODE=offline"):
        WandbSink(tmp_path, project="refused", experiment="e")
    assert wandb_runs == []
