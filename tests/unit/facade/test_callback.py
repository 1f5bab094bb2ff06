# SPDX-License-Identifier: Apache-2.0
"""What ``on_step`` sees, and how it ends a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import tandem
from tandem.driver.execution import StopSwitch
from tandem.errors import UserError
from tandem.facade.callback import CallbackSink, StepMetrics, StopTraining, require_callback
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


def test_a_callback_that_cannot_be_called_is_refused_before_the_run(tmp_path: Path) -> None:
    async def waits(report: StepMetrics) -> None: ...

    wrong: list[tuple[Any, str]] = [
        (5, "on_step=5: is not a function"),
        (waits, "is a coroutine function"),
        (lambda: None, "cannot be called with the metrics of a step"),
        (lambda report, *, name: None, "cannot be called with the metrics of a step"),
    ]
    for train in (tandem.train, tandem.sft):
        for on_step, message in wrong:
            with pytest.raises(UserError, match=message):
                train(model="m", data=[], on_step=on_step, folder=tmp_path)
    require_callback(print)
    require_callback([].append)
    require_callback(None)
