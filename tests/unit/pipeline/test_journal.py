# SPDX-License-Identifier: Apache-2.0
"""Rows come in the order of the steps, with their validations, and none is lost."""

from __future__ import annotations

import asyncio

from tandem.pipeline.journal import Journal
from tandem.types import StepReport


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def write(self, report: StepReport) -> None:
        """One row."""
        self.reports.append(report)

    def close(self) -> None:
        """Nothing is open."""


async def validation(result: asyncio.Future[dict[str, float]]) -> dict[str, float]:
    """Over when ``result`` is set."""
    return await result


def test_later_rows_wait_for_a_validation_and_the_steps_do_not() -> None:
    async def run() -> list[StepReport]:
        sink = Sink()
        journal = Journal([sink])
        result = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as tasks:
            writer = tasks.create_task(journal.run())
            validating = tasks.create_task(validation(result))
            journal.add(1, {"loss": 1.0}, validation=validating)
            journal.add(2, {"loss": 2.0}, validation=None)
            await asyncio.sleep(0.01)
            assert sink.reports == []
            result.set_result({"accuracy": 0.5})
            await journal.flush()
            writer.cancel()
        return sink.reports

    expected = [StepReport(1, {"loss": 1.0, "accuracy": 0.5}), StepReport(2, {"loss": 2.0})]
    assert asyncio.run(run()) == expected


def test_what_waits_when_a_run_fails_is_written_without_its_validation() -> None:
    async def run() -> list[StepReport]:
        sink = Sink()
        journal = Journal([sink])
        result = asyncio.get_running_loop().create_future()
        writer = asyncio.create_task(journal.run())
        validating = asyncio.create_task(validation(result))
        journal.add(1, {"loss": 1.0}, validation=validating)
        journal.add(2, {"loss": 2.0}, validation=None)
        await asyncio.sleep(0.01)
        writer.cancel()
        await asyncio.wait([writer])
        return sink.reports

    assert asyncio.run(run()) == [StepReport(1, {"loss": 1.0}), StepReport(2, {"loss": 2.0})]
