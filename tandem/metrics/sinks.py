# SPDX-License-Identifier: Apache-2.0
"""The sinks of ``trainer.logger``. Their failures do not stop a run.

``metrics.jsonl``, verl's ``file``, is always written. A dotted path names a user's sink
(docs/extend/metrics.md). A logger that is unknown or not installed is an error before the run.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TextIO

from tandem.api import MetricSink
from tandem.config.schema.imports import describe, import_dotted, import_function, is_dotted
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError
from tandem.metrics.activity import Activity
from tandem.metrics.console import LineSink, ProgressSink, VerlSink
from tandem.metrics.jsonl import JsonlSink
from tandem.metrics.mlflow_sink import MlflowSink
from tandem.metrics.swanlab_sink import SwanlabSink
from tandem.metrics.tensorboard_sink import TensorBoardSink
from tandem.metrics.wandb_sink import WandbSink
from tandem.types import StepReport

_log = logging.getLogger(__name__)

EVENTS_FOLDER = "tensorboard"
"""The folder of TensorBoard's events in the folder of a run."""

_KEY = "trainer.logger"


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSettings:
    """The facts of a run that a sink may need.

    Attributes:
        trainer: the keys ``trainer.*``, such as ``project_name`` and ``experiment_name``.
        run_folder: the existing folder of the run.
        total_steps: the number of training steps of the whole run.
        keep_through_step: the last step before a resume; -1 for a new run.
        stream: the console.
        activity: the phase that the run is in, for a sink that draws between two steps.
    """

    trainer: TrainerConfig
    run_folder: Path
    total_steps: int
    keep_through_step: int
    environment: Mapping[str, str]
    stream: TextIO
    activity: Activity


def _open_tensorboard(settings: SinkSettings) -> MetricSink:
    named = settings.environment.get("TENSORBOARD_DIR")  # as in verl
    folder = Path(named) if named else settings.run_folder / EVENTS_FOLDER
    _log.info("to see the curves: tensorboard --logdir %s", folder)
    return TensorBoardSink(folder, first_step=settings.keep_through_step + 1)


def _open_tracker(
    tracker: type[WandbSink] | type[MlflowSink] | type[SwanlabSink], settings: SinkSettings
) -> MetricSink:
    trainer = settings.trainer
    return tracker(
        settings.run_folder, project=trainer.project_name, experiment=trainer.experiment_name
    )


def _open_console(settings: SinkSettings) -> MetricSink:
    stream = settings.stream
    if not stream.isatty():
        return LineSink(stream, total_steps=settings.total_steps)
    first_step = max(settings.keep_through_step, 0)
    return ProgressSink(
        stream,
        total_steps=settings.total_steps,
        first_step=first_step,
        activity=settings.activity,
    )


def _open_verl(settings: SinkSettings) -> MetricSink:
    return VerlSink(settings.stream)


@dataclass(frozen=True, slots=True)
class _Logger:
    """A built-in logger: the function that opens it (None: always open), and its package."""

    open: Callable[[SinkSettings], MetricSink] | None
    package: str | None = None


LOGGERS: Mapping[str, _Logger] = MappingProxyType(
    {
        "console": _Logger(_open_console),
        "file": _Logger(None),
        "mlflow": _Logger(partial(_open_tracker, MlflowSink), package="mlflow"),
        "swanlab": _Logger(partial(_open_tracker, SwanlabSink), package="swanlab"),
        "tensorboard": _Logger(_open_tensorboard, package="tensorboard"),
        "verl": _Logger(_open_verl),
        "wandb": _Logger(partial(_open_tracker, WandbSink), package="wandb"),
    }
)
"""The built-in values of ``trainer.logger``."""


class GuardedSink:
    """A ``tandem.api.MetricSink`` that wraps another one and logs its first failure.

    OSError (disk, pipe, network) and ValueError (closed stream, unprintable text) are failures of
    the display. Any other exception is a defect and propagates.
    """

    def __init__(self, sink: MetricSink) -> None:
        self._sink = sink
        self._failed = False

    def write(self, report: StepReport) -> None:
        """Pass the report on, even if an earlier one failed."""
        try:
            self._sink.write(report)
        except (OSError, ValueError) as error:
            self._log_failure(error)

    def close(self) -> None:
        try:
            self._sink.close()
        except (OSError, ValueError) as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        if not self._failed:
            _log.warning("%s failed; the run continues: %s", type(self._sink).__name__, error)
        self._failed = True


def require_loggers(names: Sequence[str]) -> None:
    """Check ``trainer.logger`` without opening anything.

    Raises:
        UserError: a logger is unknown, its package is not installed, or a user's sink cannot be
            imported.
    """
    require_known_loggers(names)
    for name in names:
        if is_dotted(name):
            import_function(_KEY, name, arguments=("settings",))
        elif package := LOGGERS[name].package:
            _require_package(package, name)


def require_known_loggers(names: Sequence[str]) -> None:
    """Check ``trainer.logger`` for a run on another machine.

    Raises:
        UserError: a logger is unknown.
    """
    for name in names:
        if not is_dotted(name) and name not in LOGGERS:
            raise UserError(
                _KEY,
                name,
                rule="unknown logger",
                remedy=f"Choose among {', '.join(LOGGERS)} and package.module:Sink; "
                "metrics.jsonl is always written.",
            )


def _require_package(package: str, name: str) -> None:
    """Import the package of a logger, because an installed package may be broken."""
    remedy = f"Install it (pip install {package}) or remove {name} from {_KEY}."
    if find_spec(package) is None:
        raise UserError(_KEY, name, rule=f"the package {package} is not installed", remedy=remedy)
    try:
        import_module(package)
    except Exception as error:  # a package that is half installed can raise anything
        raise UserError(
            _KEY,
            name,
            rule=f"the package {package} is installed, but does not import: {describe(error)}",
            remedy=f"Install it anew (pip install --force-reinstall {package}) or remove {name} "
            f"from {_KEY}.",
        ) from error


def open_sinks(settings: SinkSettings) -> tuple[GuardedSink, ...]:
    """Open every sink of a run.

    A new run replaces the records of an earlier one in its folder, which is created if missing.

    Raises:
        UserError: a logger is unknown, not installed or cannot start.
    """
    loggers, kept = settings.trainer.logger, settings.keep_through_step
    require_loggers(loggers)
    sinks: list[MetricSink] = [JsonlSink(settings.run_folder, keep_through_step=kept)]
    for name in dict.fromkeys(loggers):
        if is_dotted(name):
            sinks.append(_open_dotted(name, settings))
        elif (opener := LOGGERS[name].open) is not None:
            sinks.append(opener(settings))
    return tuple(GuardedSink(sink) for sink in sinks)


def _open_dotted(name: str, settings: SinkSettings) -> MetricSink:
    sink = import_dotted(_KEY, name)(settings)
    missing = [method for method in ("write", "close") if not hasattr(sink, method)]
    if missing:
        raise UserError(
            _KEY,
            name,
            rule=f"its sink has no method {' and no method '.join(missing)}",
            remedy="Implement tandem.api.MetricSink.",
        )
    return sink
