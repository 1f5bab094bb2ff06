# SPDX-License-Identifier: Apache-2.0
"""A rollout engine over several processes that divide the experts of its model.

All processes get the same calls. Each of them takes its share of the requests, and returns the
completions of these. A sample's tokens do not depend on the process that draws them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tandem.api import Capacity, RolloutEngine
from tandem.models.parallel import Peers
from tandem.rollout.lock_step import LockStep
from tandem.types import Completion, GenerationRequest


class DividedEngine:
    """An ``api.RolloutEngine`` on one of the processes.

    Args:
        engine: generates in lock step with those of the other processes.
    """

    def __init__(self, engine: RolloutEngine, peers: Peers, *, lock_step: LockStep) -> None:
        self._engine, self._peers, self._lock_step = engine, peers, lock_step
        self._num_unfinished = 0
        self.facts = engine.facts
        own = engine.capacity
        self.capacity = Capacity(_times(own.num_rows, peers), _times(own.cache_tokens, peers))

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue this process's share of the requests."""
        loads = self._lock_step.totals(self._num_unfinished)
        own = deal(requests, loads)[self._peers.rank]
        self._num_unfinished += sum(len(request.sample_ids) for request in own)
        self._engine.add(own)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Free what is kept of samples that have ended."""
        self._engine.forget(sample_ids)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence of any process finishes; return those of this one."""
        completions = self._engine.advance(max_steps)
        self._num_unfinished -= len(completions)
        return completions

    def settle(self) -> None:
        """Wait until nothing is being computed."""
        self._engine.settle()

    def set_weights_version(self, version: int) -> bool:
        """Use the weights as ``version``."""
        return self._engine.set_weights_version(version)

    def metrics(self) -> Mapping[str, float]:
        """Return the counters of this process, and how many passes it made for others alone."""
        return {**self._engine.metrics(), "num_idle_passes": self._lock_step.num_attended}

    def sink(self) -> None:
        """Return None: the weights of the policy change in place."""

    def sleep(self) -> bool:
        """Free the cache, unless this process has something to generate."""
        return self._engine.sleep()

    def wake(self) -> None:
        """Allocate what ``sleep`` freed."""
        self._engine.wake()

    def close(self) -> None:
        """Free memory."""
        self._engine.close()


def deal(
    requests: Sequence[GenerationRequest], loads: Sequence[int]
) -> list[list[GenerationRequest]]:
    """Return the requests of each process, which keep their order.

    A request goes to the process with the fewest unfinished samples. Fewer requests than processes
    are divided evenly.

    Args:
        loads: the number of unfinished samples of each process.
    """
    loads = list(loads)
    num_samples = sum(len(request.sample_ids) for request in requests)
    share = -(-num_samples // len(loads)) if len(requests) < len(loads) else num_samples
    dealt: list[list[GenerationRequest]] = [[] for _ in loads]
    for request in requests:
        ids = request.sample_ids
        while ids:
            place = loads.index(min(loads))
            mine, ids = ids[:share], ids[share:]
            dealt[place].append(replace(request, sample_ids=mine))
            loads[place] += len(mine)
    return dealt


def _times(number: int | None, peers: Peers) -> int | None:
    return None if number is None else number * peers.size
