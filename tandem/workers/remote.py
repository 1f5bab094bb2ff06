# SPDX-License-Identifier: Apache-2.0
"""The driver's models over worker processes, which score and train.

Each implements a Protocol of ``api`` over a group of workers. Methods block until the workers
answer; the runtime calls them on threads. Micro-batches are dealt to the data-parallel ranks in
rounds of similar cost, because ranks compute in lock-step. Every rank takes part in every round,
with or without a micro-batch. Several threads may call the engines of one pool; see ``calls``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tandem.api import Loss, Scores, WorkerGroup
from tandem.config.derived.pools import RankLayout
from tandem.data.balance import batch_cost, deal
from tandem.data.wire import SentBatches
from tandem.platforms.record import Platform
from tandem.types import LossScale, PackedBatch, UpdateReport
from tandem.workers.calls import SUBMITTING, call_each


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The peak memory of the devices of a group, in bytes."""

    allocated: int = 0
    reserved: int = 0

    @classmethod
    def of(cls, platform: Platform) -> PeakMemory:
        """Return the peak of this process's device, from its allocator."""
        return cls(platform.memory_allocated_bytes(), platform.memory_reserved_bytes())

    @classmethod
    def most(cls, peaks: Iterable[PeakMemory]) -> PeakMemory:
        """Return the maximum of several peaks, field by field."""
        allocated, reserved = zip(*((x.allocated, x.reserved) for x in peaks), strict=True)
        return cls(max(allocated), max(reserved))


class RemotePolicy:
    """An ``api.ReferencePolicy`` over a group of workers.

    Args:
        task: the task under which the workers hold the model.
        layout: the model's layout over the group's ranks.
    """

    def __init__(self, group: WorkerGroup, task: str, *, layout: RankLayout) -> None:
        self._group = group
        self._task = task
        self._layout = layout

    @property
    def data_parallel_size(self) -> int:
        """The number of micro-batches computed at the same time."""
        return self._layout.data_parallel

    @property
    def sequence_parallel_size(self) -> int:
        """The number of devices that share the tokens of a micro-batch."""
        return self._layout.sequence_parallel

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Score the response tokens; see ``api.ReferencePolicy``."""
        dealt = deal([batch_cost(batch) for batch in batches], self.data_parallel_size)
        results = self._call_all("score", batches, self._task, dealt=dealt, temperature=temperature)
        found: list[Scores | None] = [None] * len(batches)
        *earlier, last = self._by_stage(results)
        for number, members in enumerate(dealt):
            for place, index in enumerate(members):
                parts = [stage[number][place] for stage in earlier]
                found[index] = _with_routes(last[number][place], parts)
        return [scores for scores in found if scores is not None]

    def _by_stage(self, results: Sequence[Any]) -> list[list[Any]]:
        """Return one of the equal results of each group of ranks, by the stages of layers.

        The last stage has all that a model computes.
        """
        one_of_each = list(results[:: self._layout.ranks_per_microbatch])
        size = self._layout.data_parallel
        return [one_of_each[i : i + size] for i in range(0, len(one_of_each), size)]

    def _call_all(
        self,
        method: str,
        batches: Sequence[PackedBatch],
        *args: Any,
        dealt: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``method`` on every rank with its micro-batches. Return the results by rank."""
        num_rounds = max(map(len, dealt), default=0)
        with SUBMITTING:
            calls = [
                self._group.submit(
                    rank,
                    method,
                    SentBatches([batches[i] for i in dealt[self._layout.group_of(rank)]]),
                    *args,
                    num_rounds=num_rounds,
                    **kwargs,
                )
                for rank in range(self._group.size)
            ]
        return self._group.gather(calls)


class RemoteTrainer(RemotePolicy):
    """An ``api.TrainEngine`` over a group of workers.

    Args:
        task: ``actor-train`` or ``critic``.
    """

    def __init__(self, group: WorkerGroup, task: str, *, layout: RankLayout) -> None:
        super().__init__(group, task, layout=layout)
        self.peak = PeakMemory()

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """Take one optimizer step; see ``api.TrainEngine``. All ranks report the same."""
        dealt = deal([batch_cost(batch) for batch in batches], self.data_parallel_size)
        results = self._call_all(
            "update",
            batches,
            self._task,
            dealt=dealt,
            loss=loss,
            scale=scale,
            temperature=temperature,
        )
        self.peak = PeakMemory.most(peak for _, peak in results)
        return results[0][0]

    def advance_schedule(self) -> None:
        """Advance the learning-rate schedule."""
        call_each([self._group], "advance_schedule", self._task)

    def save(self, folder: Path) -> None:
        """Save into ``folder``, which must be on a file system that all nodes share."""
        call_each([self._group], "save", self._task, folder)

    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote."""
        call_each([self._group], "load", self._task, folder)


def _with_routes(scores: Scores, earlier: Sequence[Scores]) -> Scores:
    """Return the scores of the last stage with the routes of all stages, in their order."""
    routes = [part.routes_TLK for part in (*earlier, scores) if part.routes_TLK is not None]
    return replace(scores, routes_TLK=torch.cat(routes, 1)) if earlier and routes else scores
