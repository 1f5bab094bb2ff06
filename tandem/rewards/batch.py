# SPDX-License-Identifier: Apache-2.0
"""The requests of one call on their way through the pool, and the future of their outcomes."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.types import RewardOutcome, RewardRequest


class Batch:
    """Collects outcomes in any order; the future ``outcomes`` is done when all are there."""

    def __init__(self, size: int) -> None:
        self.outcomes: asyncio.Future[list[RewardOutcome]] = (
            asyncio.get_running_loop().create_future()
        )
        self._collected: dict[int, RewardOutcome] = {}
        self._size = size

    def put(self, index: int, outcome: RewardOutcome) -> None:
        """Take the outcome of request ``index``. Nobody may be waiting any more."""
        self._collected[index] = outcome
        if len(self._collected) == self._size and not self.outcomes.done():
            self.outcomes.set_result([self._collected[i] for i in range(self._size)])

    def fail(self, error: Exception) -> None:
        """Let the caller raise ``error``, unless it has its outcomes already."""
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


@dataclass(slots=True, eq=False)
class Job:
    """One pickled request of a batch.

    ``is_suspect``: it was in flight when a process failed and nobody knows which request did it,
    so that it is tried again on its own.
    """

    batch: Batch
    index: int
    payload: bytes
    is_suspect: bool = False

    def finish(self, outcome: RewardOutcome) -> None:
        """Hand in the outcome."""
        self.batch.put(self.index, outcome)


def make_jobs(batch: Batch, requests: Sequence[RewardRequest]) -> list[Job]:
    """One job a request. What cannot be pickled raises here, in the call it belongs to."""
    return [Job(batch, index, pickle.dumps(request)) for index, request in enumerate(requests)]
