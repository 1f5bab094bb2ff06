# SPDX-License-Identifier: Apache-2.0
"""TensorBoard events."""

import time

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
