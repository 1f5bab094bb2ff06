# SPDX-License-Identifier: Apache-2.0
"""verl's console line, ``step:3 - critic/score/mean:0.5 - ...``, for logs that are grepped."""

from __future__ import annotations

from typing import TextIO

from tandem.types import StepReport


class ConsoleSink:
    """Implements ``tandem.api.MetricSink`` on a text stream, which stays open."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, report: StepReport) -> None:
        """Write and flush one line with every metric in full precision."""
        self._stream.write(console_line(report) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to release."""


def console_line(report: StepReport) -> str:
    """The line of one step without its newline."""
    fields = [
        f"step:{report.step}",
        *(f"{name}:{value!r}" for name, value in report.metrics.items()),
    ]
    return " - ".join(fields)
