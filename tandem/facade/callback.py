# SPDX-License-Identifier: Apache-2.0
"""The callback ``on_step``: it sees the metrics of each step and may end the run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.driver.execution import StopSwitch
from tandem.errors import UserError
from tandem.types import StepReport

logger = logging.getLogger(__name__)

_TRAINING_METRIC = "training/epoch"
"""A metric of every training step, which the record of a validation lacks."""


class StopTraining(Exception):
    """The exception by which ``on_step`` ends a run. The run saves a checkpoint and returns."""


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """The argument of ``on_step``.

    Attributes:
        step: the number of the training step, from 1.
        metrics: its metrics by name; docs/metrics.md explains them.
        validation: the metrics of the last validation that has ended; {} before the first.
    """

    step: int
    metrics: Mapping[str, float]
    validation: Mapping[str, float]


OnStep = Callable[[StepMetrics], object]


def require_callback(on_step: OnStep | None) -> None:
    """Raise UserError unless ``on_step`` is None, or a plain function of one argument."""
    if on_step is None:
        return
    remedy = "Give a function of one argument, the metrics of a step."
    if not callable(on_step):
        raise UserError("on_step", on_step, rule="is not a function", remedy=remedy)
    is_async = inspect.iscoroutinefunction
    if is_async(on_step) or is_async(getattr(on_step, "__call__", None)):  # noqa: B004
        rule = "is a coroutine function, which nothing awaits"
        raise UserError("on_step", on_step, rule=rule, remedy="Define it without async.")
    try:
        signature = inspect.signature(on_step)
    except (TypeError, ValueError):  # some functions of C have none
        return
    try:
        signature.bind("metrics")
    except TypeError as error:
        rule = f"cannot be called with the metrics of a step ({error})"
        raise UserError("on_step", on_step, rule=rule, remedy=remedy) from error


class CallbackSink:
    """A ``tandem.api.MetricSink`` that calls ``on_step`` after each training step.

    Attributes:
        error: the exception of the callback; it stops the run, which saves, and is raised later.
            ``sys.exit`` counts as one.
    """

    def __init__(self, on_step: OnStep | None, switch: StopSwitch) -> None:
        self._on_step = on_step
        self._switch = switch
        self._validation: Mapping[str, float] = {}
        self.error: Exception | SystemExit | None = None

    def write(self, report: StepReport) -> None:
        """Call the function, unless it has ended the run or ``report`` is only a validation."""
        metrics = dict(report.metrics)
        found = {name: value for name, value in metrics.items() if name.startswith("val")}
        self._validation = found or self._validation
        if self._on_step is None or self.error is not None or _TRAINING_METRIC not in metrics:
            return
        try:
            self._on_step(StepMetrics(report.step, metrics, self._validation))
        except (Exception, SystemExit) as error:
            self.error = error
            if isinstance(error, SystemExit):
                logger.warning("on_step called sys.exit: the run is saved, and the program ends")
            self._switch.press()

    def close(self) -> None:
        """Do nothing: the caller owns the function."""
