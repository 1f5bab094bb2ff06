# SPDX-License-Identifier: Apache-2.0
"""The sinks of a run: those of ``trainer.logger``, none of which can stop it."""

import io
import json
import logging
import re
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.api import MetricSink
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError
from tandem.metrics.activity import Activity
from tandem.metrics.console import LineSink
from tandem.metrics.sinks import GuardedSink, SinkSettings, open_sinks, require_loggers
from tandem.types import StepReport


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _run(folder, loggers, steps, *, keep_through_step=-1, stream=None, environment=None):
    trainer = TrainerConfig(logger=loggers, project_name="p", experiment_name="e")
    settings = SinkSettings(
        trainer=trainer,
        run_folder=folder,
        total_steps=4,
        keep_through_step=keep_through_step,
        environment=environment or {},
        stream=stream or io.StringIO(),
        activity=Activity(),
    )
    sinks = open_sinks(settings)
    for step in steps:
        for sink in sinks:
            sink.write(StepReport(step, {"critic/score/mean": step / 3}))
    for sink in sinks:
        sink.close()
    return sinks


def _steps(folder):
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("loggers", [["console"], ["file"], ["file", "console", "file"]])
def test_metrics_are_always_on_disk_once(tmp_path, loggers):
    _run(tmp_path, loggers, range(3))

    assert _steps(tmp_path) == [0, 1, 2]


def test_a_resumed_run_continues_the_file(tmp_path):
    _run(tmp_path / "whole", ["console"], range(4))
    _run(tmp_path / "resumed", ["console"], range(3))
    _run(tmp_path / "resumed", ["console"], range(2, 4), keep_through_step=1)

    whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    assert (tmp_path / "resumed" / "metrics.jsonl").read_bytes() == whole


def test_a_new_run_does_not_continue_an_old_one(tmp_path):
    _run(tmp_path, ["console"], range(4))
    _run(tmp_path, ["console"], range(1))

    assert _steps(tmp_path) == [0]


def test_the_console_is_a_line_in_a_log_and_a_bar_at_a_terminal(tmp_path):
    log, terminal = io.StringIO(), _Terminal()
    _run(tmp_path, ["console", "verl"], [1], stream=log)
    _run(tmp_path, ["console"], [1], stream=terminal)

    short, long = log.getvalue().splitlines()
    assert re.match(r"\d\d:\d\d:\d\d step 1/4  reward 0\.333", short)
    assert long.startswith("step:1 - critic/score/mean:0.333333")
    assert "1/4" in terminal.getvalue()


@pytest.mark.parametrize(("named", "folder"), [("events", "events"), ("", "run/tensorboard")])
def test_tensorboard_goes_into_the_run_folder_unless_the_environment_names_another(
    tmp_path, monkeypatch, named, folder
):
    monkeypatch.chdir(tmp_path)
    _run(tmp_path / "run", ["tensorboard"], [1], environment={"TENSORBOARD_DIR": named})

    assert len(list((tmp_path / folder).glob("events.out.tfevents.*"))) == 1


def test_a_resumed_run_keeps_the_earlier_events(tmp_path):
    environment = {"TENSORBOARD_DIR": str(tmp_path / "events")}
    _run(tmp_path, ["tensorboard"], range(4), environment=environment)
    _run(tmp_path, ["tensorboard"], [2], keep_through_step=1, environment=environment)

    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    assert [event.step for event in events.Scalars("critic/score/mean")] == [0, 1, 2]


def test_a_missing_package_is_said_before_anything_is_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)

    with pytest.raises(UserError, match="trainer.logger='wandb'.*pip install wandb"):
        _run(tmp_path / "run", ["console", "wandb"], [])
    assert not (tmp_path / "run").exists()


def test_an_unknown_logger():
    with pytest.raises(UserError, match="trainer.logger='clearml'.*console, file, mlflow"):
        require_loggers(["console", "clearml"])


def test_a_display_that_fails_is_logged_once_and_the_run_goes_on(caplog):
    stream = io.StringIO()
    sink = GuardedSink(LineSink(stream, total_steps=4))
    stream.close()

    with caplog.at_level(logging.WARNING):
        for step in range(3):
            sink.write(StepReport(step, {}))
        sink.close()

    assert [record.getMessage() for record in caplog.records] == [
        "LineSink failed; the run continues: I/O operation on closed file"
    ]


def test_a_defect_is_not_hidden():
    sink: MetricSink = GuardedSink(LineSink(io.StringIO(), total_steps=4))

    with pytest.raises(AttributeError):
        sink.write(None)  # type: ignore[arg-type]


OWN = """
class Sink:
    def __init__(self, settings):
        self.file = (settings.run_folder / f"{settings.trainer.project_name}.txt").open("w")

    def write(self, report):
        self.file.write(f"{report.step} {sorted(report.metrics)}\\n")

    def close(self):
        self.file.close()


def without_close(settings):
    return object()


NUMBER = 5
"""


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    (tmp_path / "own_sinks.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_sinks", raising=False)


def test_a_sink_of_the_user(tmp_path, own_file):
    _run(tmp_path / "run", ["console", "own_sinks:Sink"], [1, 2])

    expected = "1 ['critic/score/mean']\n2 ['critic/score/mean']\n"
    assert (tmp_path / "run" / "p.txt").read_text() == expected


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("own_sinks:NUMBER", "is neither a class nor a function"),
        ("own_sinks:missing", "module own_sinks has no attribute 'missing'"),
        ("own_sinks:without_close", "its sink has no method write and no method close"),
    ],
)
def test_a_sink_of_the_user_that_cannot_work_is_named(tmp_path, own_file, name, rule):
    with pytest.raises(UserError) as caught:
        _run(tmp_path / "run", [name], [])

    assert (caught.value.key, caught.value.value) == ("trainer.logger", name)
    assert caught.value.rule == rule


def test_a_package_that_does_not_import_is_refused_before_the_run(tmp_path, monkeypatch) -> None:
    (tmp_path / "wandb.py").write_text("raise AttributeError('a half of it is missing')")
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match="wandb is installed, but does not import: AttributeError"):
        require_loggers(["wandb"])
