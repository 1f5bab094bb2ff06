# SPDX-License-Identifier: Apache-2.0
"""TensorBoard events."""

import sys
import time

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.errors import UserError
from tandem.metrics.tensorboard_sink import TensorBoardSink
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
    begin_s = int(time.time())
    while int(time.time()) == begin_s:  # the second in a file's name gives the order of files
        time.sleep(0.01)
    resumed = TensorBoardSink(tmp_path, first_step=2)
    resumed.write(StepReport(2, {"critic/score/mean": 0.875}))
    resumed.close()

    assert _steps(tmp_path, "critic/score/mean") == [(0, 0.0), (1, 0.25), (2, 0.875)]


def test_a_tensorboard_that_does_not_import_is_an_error_that_names_the_key(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with pytest.raises(UserError, match="trainer.logger='tensorboard': .* does not import: .*pip"):
        TensorBoardSink(tmp_path, first_step=0)
