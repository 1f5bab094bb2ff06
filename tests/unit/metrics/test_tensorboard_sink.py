# SPDX-License-Identifier: Apache-2.0
"""TensorBoard events, and where they go."""

import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.errors import UserError
from tandem.metrics.tensorboard_sink import TensorBoardSink, tensorboard_folder
from tandem.types import StepReport


def _steps(folder, name):
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_a_resumed_run_hides_the_steps_it_repeats(tmp_path):
    first = TensorBoardSink(tmp_path, first_step=0)
    for step in range(4):
        first.write(StepReport(step, {"critic/score/mean": step / 4}))
    first.close()
    resumed = TensorBoardSink(tmp_path, first_step=2)
    resumed.write(StepReport(2, {"critic/score/mean": 0.875}))
    resumed.close()

    assert _steps(tmp_path, "critic/score/mean") == [(0, 0.0), (1, 0.25), (2, 0.875)]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "tensorboard_log/project/run"),
        ({"TENSORBOARD_DIR": ""}, "tensorboard_log/project/run"),
        ({"TENSORBOARD_DIR": "/logs/x"}, "/logs/x"),
    ],
)
def test_the_folder_is_verls(environment, folder):
    assert tensorboard_folder("project", "run", environment=environment) == Path(folder)


def test_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(UserError, match="tensorboard is not installed.*trainer.logger"):
        TensorBoardSink(tmp_path, first_step=0)
