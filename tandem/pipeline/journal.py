# SPDX-License-Identifier: Apache-2.0
"""The metrics of the steps on their way to the sinks, in the order of the steps.

A row whose validation is not over yet waits for it, and the rows behind wait too; the steps do not.
A row that would be empty is none: its validation was dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.api import MetricSink
from tandem.types import StepReport

Metrics = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class _Row:
    step: int
    metrics: Metrics
    validation: asyncio.Future[Metrics] | None


class Journal:
    """Consumes: rows. Waits for: validations. Produces: reports in the sinks."""

    def __init__(self, sinks: Sequence[MetricSink]) -> None:
        self._sinks = sinks
        self._rows: asyncio.Queue[_Row] = asyncio.Queue()

    def add(
        self, step: int, metrics: Metrics, *, validation: asyncio.Future[Metrics] | None
    ) -> None:
        """The next row; what ``validation`` returns goes into it."""
        self._rows.put_nowait(_Row(step, metrics, validation))

    async def flush(self) -> None:
        """Return once all rows are written."""
        await self._rows.join()

    async def run(self) -> None:
        """Write rows. Ends only by cancellation: what is left is then written as it is."""
        row: _Row | None = None
        try:
            while True:
                row = await self._rows.get()
                validated: Metrics = {} if row.validation is None else await row.validation
                self._write(row.step, {**row.metrics, **validated})
                row = None
                self._rows.task_done()
        finally:
            left = [] if row is None else [row]
            while not self._rows.empty():
                left.append(self._rows.get_nowait())
            for unfinished in left:
                self._write(unfinished.step, unfinished.metrics)

    def _write(self, step: int, metrics: Metrics) -> None:
        report = StepReport(step, metrics)
        for sink in self._sinks if metrics else ():
            sink.write(report)
