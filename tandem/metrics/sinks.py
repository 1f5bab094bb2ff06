# SPDX-License-Identifier: Apache-2.0
"""Opens the sinks that ``trainer.logger`` names, and keeps their failures from stopping a run.

``metrics.jsonl`` is always written; verl's ``file`` is another name for it. ``console`` is a
progress bar at a terminal and verl's line elsewhere. What cannot work (a logger that is not
installed) is said before the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError
from tandem.metrics.console_sink import ConsoleSink
from tandem.metrics.jsonl_sink import JsonlSink
from tandem.metrics.progress_sink import ProgressSink
from tandem.metrics.tensorboard_sink import TensorBoardSink, tensorboard_folder
from tandem.metrics.wandb_sink import WandbSink
from tandem.types import StepReport

_log = logging.getLogger(__name__)

Sink = JsonlSink | ConsoleSink | ProgressSink | TensorBoardSink | WandbSink

LOGGER_PACKAGES = {"console": None, "file": None, "tensorboard": "tensorboard", "wandb": "wandb"}
"""What ``trainer.logger`` may name, and the package it needs."""


class GuardedSink:
    """Implements ``tandem.api.MetricSink`` around another one, whose failures it logs once.

    A display fails with OSError (disk, pipe, network) or ValueError (closed stream, unprintable
    text); any other exception is a defect and passes.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._failed = False

    def write(self, report: StepReport) -> None:
        """Pass the report on; the next one is tried again after a failure."""
        try:
            self._sink.write(report)
        except (OSError, ValueError) as error:
            self._log_failure(error)

    def close(self) -> None:
        """Close the sink."""
        try:
            self._sink.close()
        except (OSError, ValueError) as error:
            self._log_failure(error)

    def _log_failure(self, error: Exception) -> None:
        if not self._failed:
            _log.warning(
                "%s fails, the run goes on without it: %s", type(self._sink).__name__, error
            )
        self._failed = True


def require_loggers(names: Sequence[str]) -> None:
    """Check ``trainer.logger`` without opening anything.

    Raises:
        UserError: a logger is unknown or its package is not installed.
    """
    for name in names:
        if name not in LOGGER_PACKAGES:
            raise UserError(
                f"trainer.logger={name!r}: is not a logger of ours. "
                f"Choose among {', '.join(LOGGER_PACKAGES)}; metrics.jsonl is always written."
            )
        package = LOGGER_PACKAGES[name]
        if package is not None and find_spec(package) is None:
            raise UserError(
                f"trainer.logger={name!r}: the package {package} is not installed. "
                f"Install it (pip install {package}) or take {name} out of trainer.logger."
            )


def open_sinks(
    trainer: TrainerConfig,
    run_folder: Path,
    *,
    total_steps: int,
    keep_through_step: int,
    environment: Mapping[str, str],
    stream: TextIO,
) -> tuple[GuardedSink, ...]:
    """Open every sink of a run.

    Args:
        run_folder: where ``metrics.jsonl`` goes; made if it is missing.
        keep_through_step: the last step of which records stay in this folder; -1 for a new run,
            which replaces those of an earlier one.
        environment: read for TENSORBOARD_DIR.
        stream: the console.

    Raises:
        UserError: a logger is unknown, not installed or refuses to start.
    """
    names = tuple(dict.fromkeys(trainer.logger))
    require_loggers(names)
    sinks: list[Sink] = [JsonlSink(run_folder, keep_through_step=keep_through_step)]
    if "tensorboard" in names:
        folder = tensorboard_folder(
            trainer.project_name, trainer.experiment_name, environment=environment
        )
        sinks.append(TensorBoardSink(folder, first_step=keep_through_step + 1))
    if "wandb" in names:
        project, experiment = trainer.project_name, trainer.experiment_name
        sinks.append(WandbSink(run_folder, project=project, experiment=experiment))
    if "console" in names:
        sinks.append(
            _console(stream, total_steps=total_steps, first_step=max(keep_through_step, 0))
        )
    return tuple(GuardedSink(sink) for sink in sinks)


def _console(stream: TextIO, *, total_steps: int, first_step: int) -> Sink:
    if stream.isatty():
        return ProgressSink(stream, total_steps=total_steps, first_step=first_step)
    return ConsoleSink(stream)
