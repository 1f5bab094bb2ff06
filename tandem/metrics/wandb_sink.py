# SPDX-License-Identifier: Apache-2.0
"""The sink of Weights & Biases, which itself reads WANDB_MODE, WANDB_ENTITY and so on."""

from __future__ import annotations

from pathlib import Path

from tandem.errors import UserError
from tandem.metrics.recorded_config import read_recorded_config
from tandem.types import StepReport

STEP_METRIC = "training/global_step"
"""The horizontal axis of all charts, because W&B's own step drops late records of validations."""


class WandbSink:
    """A ``tandem.api.MetricSink`` that logs to a W&B run."""

    def __init__(self, run_folder: Path, *, project: str, experiment: str) -> None:
        """Start a W&B run with the ``config.json`` of ``run_folder``.

        Raises:
            UserError: wandb cannot start, for example without a login.
        """
        import wandb  # noqa: PLC0415 # pyright: ignore[reportMissingImports]

        self._error = wandb.Error
        config = read_recorded_config(run_folder)
        try:
            self._run = wandb.init(
                project=project, name=experiment, dir=str(run_folder), config=config
            )
        except wandb.Error as error:
            raise UserError(
                "trainer.logger",
                "wandb",
                rule=f"W&B cannot start ({error})",
                remedy="Log in (wandb login), set WANDB_MODE=offline, or remove it from "
                "trainer.logger.",
            ) from error
        self._run.define_metric("*", step_metric=STEP_METRIC)

    def write(self, report: StepReport) -> None:
        """Log the metrics of a step. Raise OSError if W&B fails."""
        try:
            self._run.log({**report.metrics, STEP_METRIC: report.step})
        except self._error as error:
            raise OSError(f"W&B: {error}") from error

    def close(self) -> None:
        self._run.finish()
