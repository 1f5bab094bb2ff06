# SPDX-License-Identifier: Apache-2.0
"""What ``on_step`` sees, and how it ends a run."""

from __future__ import annotations

import sys

import pytest

from tandem.driver.execution import StopSwitch
from tandem.facade.callback import CallbackSink, StepMetrics, StopTraining
from tandem.types import StepReport

STEP = {"training/epoch": 0.0}


def test_only_training_steps_are_seen_with_the_last_validation() -> None:
    seen: list[StepMetrics] = []
    sink = CallbackSink(seen.append, StopSwitch())
    sink.write(StepReport(0, {"val-core/x/acc/mean@1": 0.5}))
    sink.write(StepReport(1, STEP))
    assert [(report.step, dict(report.validation)) for report in seen] == [
        (1, {"val-core/x/acc/mean@1": 0.5})
    ]


@pytest.mark.parametrize("kind", [StopTraining, ValueError, SystemExit])
def test_an_exception_stops_the_run_and_is_kept(
    kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def leave(report: StepMetrics) -> None:
        calls.append(report.step)
        if kind is SystemExit:
            sys.exit(3)
        raise kind

    switch = StopSwitch()
    sink = CallbackSink(leave, switch)
    for step in (1, 2):
        sink.write(StepReport(step, STEP))
    assert calls == [1] and switch.is_pressed
    assert isinstance(sink.error, kind)
    says_so = "on_step called sys.exit: the run is saved, and the program ends"
    assert caplog.messages == ([says_so] if kind is SystemExit else [])
