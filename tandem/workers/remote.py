# SPDX-License-Identifier: Apache-2.0
"""The engines of a run whose work is done by other processes, as the driver sees them.

Each implements a Protocol of ``api`` over a group of workers. Their methods wait for the workers;
the runtime calls them on threads. Micro-batches are dealt to the data-parallel ranks in rounds that
cost about the same, because ranks compute in lock-step. A rank that a round leaves without a
micro-batch is told how many rounds there are, and takes part without one. Several threads may call
the engines of one pool: its ranks receive the calls in one order all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from tandem.api import Loss, WorkerGroup
from tandem.config.derived.pools import RankLayout
from tandem.data.balance import batch_cost, deal
from tandem.data.wire import SentBatches
from tandem.platforms.record import Platform
from tandem.types import (
    Completion,
    EngineWork,
    GenerationRequest,
    LossScale,
    PackedBatch,
    UpdateReport,
)

_SUBMITTING = threading.Lock()
"""Held while a call is submitted to all ranks of a pool: ranks that met two collectives in
different orders would wait for each other for ever."""


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """The most that a device of a group has held, bytes."""

    allocated: int = 0
    reserved: int = 0

    @classmethod
    def of(cls, platform: Platform) -> PeakMemory:
        """As its allocator has counted in this process."""
        return cls(platform.memory_allocated_bytes(), platform.memory_reserved_bytes())


class RemotePolicy:
    """``api.ReferencePolicy``: a model that a group of workers scores with.

    Args:
        task: under which of its tasks the workers know the model.
        layout: how the group's ranks divide for it.
    """

    def __init__(self, group: WorkerGroup, task: str, *, layout: RankLayout) -> None:
        self._group = group
        self._task = task
        self._layout = layout

    @property
    def data_parallel_size(self) -> int:
        """See ``api.TrainEngine.data_parallel_size``."""
        return self._layout.data_parallel

    @property
    def sequence_parallel_size(self) -> int:
        """See ``api.TrainEngine.sequence_parallel_size``."""
        return self._layout.sequence_parallel

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """See ``api.TrainEngine.score``."""
        dealt = deal([batch_cost(batch) for batch in batches], self.data_parallel_size)
        results = self._call_all("score", batches, self._task, dealt=dealt, temperature=temperature)
        columns: list[Tensor | None] = [None] * len(batches)
        for members, scored in zip(
            dealt, results[:: self._layout.ranks_per_microbatch], strict=True
        ):
            for index, column_R in zip(members, scored, strict=True):
                columns[index] = column_R
        return [column_R for column_R in columns if column_R is not None]

    def _call_all(
        self,
        method: str,
        batches: Sequence[PackedBatch],
        *args: Any,
        dealt: Sequence[Sequence[int]],
        **kwargs: Any,
    ) -> list[Any]:
        """``method`` on every rank with its micro-batches; the results by rank."""
        num_rounds = max(map(len, dealt), default=0)
        with _SUBMITTING:
            calls = [
                self._group.submit(
                    rank,
                    method,
                    SentBatches(
                        [batches[i] for i in dealt[rank // self._layout.ranks_per_microbatch]]
                    ),
                    *args,
                    num_rounds=num_rounds,
                    **kwargs,
                )
                for rank in range(self._group.size)
            ]
        return self._group.gather(calls)


class RemoteTrainer(RemotePolicy):
    """``api.TrainEngine`` over a group of workers.

    Args:
        task: ``actor-train`` or ``critic``.
    """

    def __init__(self, group: WorkerGroup, task: str, *, layout: RankLayout) -> None:
        super().__init__(group, task, layout=layout)
        self.peak = PeakMemory()

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """See ``api.TrainEngine.update``; all ranks report the same."""
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
        peaks = [peak for _, peak in results]
        self.peak = PeakMemory(
            max(peak.allocated for peak in peaks), max(peak.reserved for peak in peaks)
        )
        return results[0][0]

    def advance_schedule(self) -> None:
        """See ``api.TrainEngine.advance_schedule``."""
        call_each([self._group], "advance_schedule", self._task)

    def save(self, folder: Path) -> None:
        """All ranks write into ``folder``, which every node must see."""
        call_each([self._group], "save", self._task, folder)

    def load(self, folder: Path) -> None:
        """See ``api.TrainEngine.load``."""
        call_each([self._group], "load", self._task, folder)


@dataclass(frozen=True, slots=True)
class WeightWay:
    """How weights come from the trainer to those that use them.

    Attributes:
        linked: all pools that send or receive.
        scoring: those that only score with them; they take them when they come to it.
        is_staged: ``RemoteStage`` sends them, and each worker takes them as soon as it has them;
            else all pools bring them into use together.
    """

    linked: Sequence[WorkerGroup]
    scoring: Sequence[WorkerGroup] = ()
    is_staged: bool = False


class RemoteRollout:
    """``api.RolloutEngine`` over workers that each generate for themselves.

    A request goes to the worker with the fewest sequences to do, which depends on nothing but the
    order of requests as long as they come in batches that are waited for. Each worker is one call
    ahead of what has been collected, and does not wait for the others.

    Args:
        way: how weights come to it.
    """

    def __init__(self, group: WorkerGroup, way: WeightWay) -> None:
        self._group = group
        self._way = way
        self._unfinished = [0] * group.size
        self._added: list[list[Any]] = [[] for _ in range(group.size)]
        self._advancing: dict[int, Any] = {}
        self._finished: list[Completion] = []
        self._wanted_version: int | None = None
        self._versions = [-1] * group.size
        self._swaps: dict[int, Any] = {}
        self._late: list[Any] = []
        self._is_held = False

    def work(self) -> list[EngineWork]:
        """What each worker has to do; whose call was not collected yet goes on by itself."""
        return [self._work_of(rank, number) for rank, number in enumerate(self._unfinished)]

    def _work_of(self, rank: int, num_unfinished: int) -> EngineWork:
        if rank in self._advancing:
            return EngineWork.UNDER_WAY
        return EngineWork.NEXT if num_unfinished and not self._is_held else EngineWork.NONE

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """See ``api.RolloutEngine.add``."""
        dealt: list[list[GenerationRequest]] = [[] for _ in self._unfinished]
        for request in requests:
            rank = self._unfinished.index(min(self._unfinished))
            self._unfinished[rank] += len(request.sample_ids)
            dealt[rank].append(request)
        for rank, mine in enumerate(dealt):
            if mine:
                self._added[rank].append(self._group.submit(rank, "add", mine))

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """What one of the workers has finished; see ``api.RolloutEngine.advance``."""
        for rank, number in enumerate(self._unfinished):
            if number and rank not in self._advancing and not self._is_held:
                if self._wanted_version is not None:
                    self._swaps[rank] = self._group.submit(rank, "swap")
                self._advancing[rank] = self._group.submit(rank, "advance", max_steps)
        if self._finished:
            finished, self._finished = self._finished, []
            return finished
        if not self._advancing:
            return []
        ranks = list(self._advancing)  # who was asked first comes first
        return self._collect(ranks[self._group.first([self._advancing[rank] for rank in ranks])])

    def _collect(self, rank: int) -> list[Completion]:
        """Wait for what it was asked."""
        calls = [*self._added[rank], self._advancing.pop(rank)]
        self._added[rank] = []
        completions: list[Completion] = self._group.gather(calls)[-1]
        self._unfinished[rank] -= len(completions)
        if rank in self._swaps:
            (self._versions[rank],) = self._group.gather([self._swaps.pop(rank)])
        return completions

    def settle(self) -> None:
        """See ``api.RolloutEngine``. It collects from every worker that was asked to advance."""
        for rank in list(self._advancing):
            self._finished += self._collect(rank)

    def release_cache(self) -> bool:
        """See ``api.RolloutEngine``. Workers do so by themselves where their devices train."""
        return not any(self._unfinished)

    def set_weights_version(self, version: int) -> bool:
        """See ``api.RolloutEngine``. A worker takes part between two of its advances; where all
        take part together, none begins another before.
        """
        if not self._way.is_staged:
            self._is_held = bool(self._advancing)
            if self._is_held:
                return False
            call_each(self._way.linked, "transfer", version)
            call_each(self._way.linked, "swap", version)
            return True
        self._wanted_version = version
        busy = [self._versions[rank] for rank, number in enumerate(self._unfinished) if number]
        if busy and min(busy) < version:
            return False
        self._group.gather(self._late)
        self._late = submit_each(self._way.scoring, "swap", version)
        call_each([self._group], "swap", version)
        self._wanted_version = None
        return True


class RemoteStage:
    """``api.WeightStage`` over the pools that the weight link joins.

    Its calls run beside those of the rollout, which goes on generating.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups

    def stage(self, version: int) -> None:
        """See ``api.WeightStage.stage``."""
        call_each(self._groups, "transfer", version)


def submit_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Start the same call on every worker of some groups."""
    with _SUBMITTING:
        return [group.submit(rank, method, *args) for group in groups for rank in range(group.size)]


def call_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """The same call on every worker of some groups; the results by group and rank."""
    return groups[0].gather(submit_each(groups, method, *args))
