# SPDX-License-Identifier: Apache-2.0
"""The sink of SwanLab, which itself reads SWANLAB_API_KEY, SWANLAB_MODE and so on."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import UserError
from tandem.metrics.recorded_config import read_recorded_config
from tandem.types import StepReport


class SwanlabSink:
    """A ``tandem.api.MetricSink`` that logs to an experiment of SwanLab."""

    def __init__(self, run_folder: Path, *, project: str, experiment: str) -> None:
        """Start an experiment with the ``config.json`` of ``run_folder``.

        Raises:
            UserError: SwanLab cannot start, for example without a login.
        """
        import swanlab  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        config = read_recorded_config(run_folder)
        try:
            self._run = swanlab.init(
                project=project, experiment_name=experiment, logdir=str(run_folder), config=config
            )
        except Exception as error:
            # Its versions raise errors of different kinds, most of them of its own.
            raise UserError(
                "trainer.logger",
                "swanlab",
                rule=f"SwanLab cannot start ({' '.join(str(error).split())})",
                remedy="Log in (swanlab login), set SWANLAB_MODE=offline, or remove it from "
                "trainer.logger.",
            ) from error

    def write(self, report: StepReport) -> None:
        """Log the metrics of a step."""
        self._run.log(dict(report.metrics), step=report.step)

    def close(self) -> None:
        """End the experiment."""
        self._run.finish()
