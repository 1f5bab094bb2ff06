# SPDX-License-Identifier: Apache-2.0
"""TensorBoard scalars in verl's folder, ``tensorboard_log/<project>/<experiment>`` by default."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tandem.errors import UserError
from tandem.types import StepReport

_FLUSH_SECONDS = 10


class TensorBoardSink:
    """Implements ``tandem.api.MetricSink``."""

    def __init__(self, folder: Path, *, first_step: int) -> None:
        """Write events into ``folder``; older ones from ``first_step`` on are hidden.

        Raises:
            UserError: tensorboard is not installed.
        """
        try:
            from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
        except ImportError as error:
            raise UserError(
                "trainer.logger='tensorboard': the package tensorboard is not installed. "
                "Install it (pip install tensorboard) or take it out of trainer.logger."
            ) from error
        self._writer = SummaryWriter(str(folder), purge_step=first_step, flush_secs=_FLUSH_SECONDS)

    def write(self, report: StepReport) -> None:
        """Add one scalar a metric."""
        for name, value in report.metrics.items():
            self._writer.add_scalar(name, value, report.step)

    def close(self) -> None:
        """Flush and close; idempotent."""
        self._writer.close()


def tensorboard_folder(project: str, experiment: str, *, environment: Mapping[str, str]) -> Path:
    """Where verl puts the events of a run."""
    default = Path("tensorboard_log") / project / experiment
    return Path(environment.get("TENSORBOARD_DIR") or default)
