# SPDX-License-Identifier: Apache-2.0
"""The sink of every run: ``metrics.jsonl``, ``{"step": 3, "critic/score/mean": ...}`` a line."""

from __future__ import annotations

from pathlib import Path

from tandem.metrics.jsonl import JsonLinesFile
from tandem.types import StepReport

METRICS_FILE = "metrics.jsonl"


class JsonlSink:
    """Implements ``tandem.api.MetricSink``."""

    def __init__(self, run_folder: Path, *, keep_through_step: int) -> None:
        self._file = JsonLinesFile(run_folder / METRICS_FILE, keep_through_step=keep_through_step)

    def write(self, report: StepReport) -> None:
        """Append one line."""
        metrics = {name: float(value) for name, value in report.metrics.items()}
        self._file.append({"step": report.step, **metrics})

    def close(self) -> None:
        """Close the file; idempotent."""
        self._file.close()
