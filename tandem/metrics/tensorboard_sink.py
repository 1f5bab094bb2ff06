# SPDX-License-Identifier: Apache-2.0
"""The sink of TensorBoard, which writes scalars."""

from __future__ import annotations

from pathlib import Path

from tandem.config.schema.imports import describe
from tandem.errors import UserError
from tandem.types import StepReport

_FLUSH_SECONDS = 10


class TensorBoardSink:
    """A ``tandem.api.MetricSink`` that writes scalars to TensorBoard's event files."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Write events into ``folder``, and hide earlier ones from ``first_step`` on.

        Raises:
            UserError: tensorboard, or what it needs, does not import.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                "trainer.logger",
                "tensorboard",
                rule=f"torch.utils.tensorboard does not import: {describe(error)}",
                remedy="Repair it (pip install tensorboard) or remove it from trainer.logger.",
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=_FLUSH_SECONDS)

    def write(self, report: StepReport) -> None:
        for name, value in report.metrics.items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Flush and close; idempotent."""
        self._writer.close()
