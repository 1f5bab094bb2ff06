# SPDX-License-Identifier: Apache-2.0
"""The driver's engines over worker processes.

Each implements a Protocol of ``api`` over a group of workers. Methods block until the workers
answer; the runtime calls them on threads. Micro-batches are dealt to the data-parallel ranks in
rounds of similar cost, because ranks compute in lock-step. Every rank takes part in every round,
with or without a micro-batch. Several threads may call the engines of one pool: all its ranks
receive the calls in the same order.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""Held while a call is submitted to all ranks of a pool. Ranks that enter two collectives in
different orders deadlock.
"""


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

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Tensor]:
        """Score the response tokens; see ``api.ReferencePolicy``."""
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
        """Call ``method`` on every rank with its micro-batches. Return the results by rank."""
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


@dataclass(frozen=True, slots=True)
class WeightRoute:
    """The route of weights from the trainer to the pools that use them.

    Attributes:
        linked: all pools that send or receive weights.
        scoring: pools that only score. The driver does not wait for them to use new weights.
        is_staged: whether ``RemoteStage`` sends weights and each worker puts them into use on its
            own. Otherwise all pools do so together.
    """

    linked: Sequence[WorkerGroup]
    scoring: Sequence[WorkerGroup] = ()
    is_staged: bool = False


class RemoteRollout:
    """An ``api.Rollout`` over engines that generate independently, each in one or more workers.

    A request goes to the engine with the fewest unfinished sequences. Fewer requests than idle
    engines are divided among them. The choice depends only on the order of requests if the caller
    waits for each batch, and no token depends on it, because each sample has its own draws. Each
    engine runs one call ahead of the collected results, independently of the others. All workers of
    an engine get the same calls, and the first of them returns the results.
    """

    def __init__(
        self, group: WorkerGroup, route: WeightRoute, *, ranks_per_engine: int = 1
    ) -> None:
        self._group = group
        self._route = route
        self._num_ranks = ranks_per_engine
        num_engines = group.size // ranks_per_engine
        self._unfinished = [0] * num_engines
        self._added: list[list[Any]] = [[] for _ in range(num_engines)]
        self._advancing: dict[int, list[Any]] = {}
        self._finished: list[Completion] = []
        self._wanted_version: int | None = None
        self._versions = [-1] * num_engines
        self._swaps: dict[int, list[Any]] = {}
        self._late: list[Any] = []
        self._is_held = False
        self._counters: list[Mapping[str, float]] = [{}] * num_engines

    def work(self) -> list[EngineWork]:
        """Return the state of each engine. An engine with an uncollected call needs no new one."""
        return [self._work_of(engine, number) for engine, number in enumerate(self._unfinished)]

    def _submit(self, engine: int, method: str, /, *args: Any) -> list[Any]:
        """Start a call on every worker of an engine, the first of them first."""
        first = engine * self._num_ranks
        with _SUBMITTING:
            return [
                self._group.submit(rank, method, *args)
                for rank in range(first, first + self._num_ranks)
            ]

    def _work_of(self, engine: int, num_unfinished: int) -> EngineWork:
        if engine in self._advancing:
            return EngineWork.UNDER_WAY
        return EngineWork.NEXT if num_unfinished and not self._is_held else EngineWork.NONE

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, each at the engine with the fewest unfinished sequences.

        A part of a divided request ends where its engine has its share of all new samples.
        """
        num_idle = self._unfinished.count(0)
        num_samples = sum(len(request.sample_ids) for request in requests)
        is_divided = len(requests) < num_idle
        share = -(-num_samples // max(num_idle, 1))
        dealt: list[list[GenerationRequest]] = [[] for _ in self._unfinished]
        for request in requests:
            ids = request.sample_ids
            while ids:
                engine = self._unfinished.index(min(self._unfinished))
                room = max(share - self._unfinished[engine], 1) if is_divided else len(ids)
                dealt[engine].append(replace(request, sample_ids=ids[:room]))
                self._unfinished[engine] += len(ids[:room])
                ids = ids[room:]
        for engine, mine in enumerate(dealt):
            if mine:
                self._added[engine] += self._submit(engine, "add", mine)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Return the completions of the first engine that answers; see ``api.Rollout``."""
        for engine, number in enumerate(self._unfinished):
            if number and engine not in self._advancing and not self._is_held:
                if self._wanted_version is not None:
                    self._swaps[engine] = self._submit(engine, "swap")
                self._advancing[engine] = self._submit(engine, "advance", max_steps)
        if self._finished:
            finished, self._finished = self._finished, []
            return finished
        if not self._advancing:
            return []
        engines = list(self._advancing)  # in the order of their calls
        first_calls = [self._advancing[engine][0] for engine in engines]
        return self._collect(engines[self._group.first(first_calls)])

    def _collect(self, engine: int) -> list[Completion]:
        """Wait for the calls of an engine and return its completions."""
        calls = [*self._added[engine], *self._advancing.pop(engine)]
        self._added[engine] = []
        completions: list[Completion]
        completions, self._counters[engine] = self._group.gather(calls)[-self._num_ranks]
        self._unfinished[engine] -= len(completions)
        if engine in self._swaps:
            self._versions[engine] = min(self._group.gather(self._swaps.pop(engine)))
        return completions

    def settle(self) -> None:
        """Wait for every engine that advances, and keep its completions."""
        for engine in list(self._advancing):
            self._finished += self._collect(engine)

    def metrics(self) -> Mapping[str, float]:
        """Return the sums of the engines' counters as of each one's last collected call."""
        names = dict.fromkeys(name for counters in self._counters for name in counters)
        return {name: sum(c.get(name, 0.0) for c in self._counters) for name in names}

    def set_weights_version(self, version: int) -> bool:
        """Put ``version`` into use; see ``api.Rollout``.

        An engine switches between two of its advances. Without staging all engines switch together,
        and none starts another advance before.
        """
        if not self._route.is_staged:
            self._is_held = bool(self._advancing)
            if self._is_held:
                return False
            call_each(self._route.linked, "transfer", version)
            call_each(self._route.linked, "swap", version)
            return True
        self._wanted_version = version
        busy = [self._versions[rank] for rank, number in enumerate(self._unfinished) if number]
        if busy and min(busy) < version:
            return False
        self._group.gather(self._late)
        self._late = submit_each(self._route.scoring, "swap", version)
        call_each([self._group], "swap", version)
        self._wanted_version = None
        return True


class RemoteStage:
    """An ``api.WeightStage`` over the pools of the weight link.

    Its calls run while the rollout generates.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups

    def stage(self, version: int) -> None:
        """Send the trainer's weights as ``version``; see ``api.WeightStage``."""
        call_each(self._groups, "transfer", version)


def submit_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Start the same call on every worker of some groups."""
    with _SUBMITTING:
        return [group.submit(rank, method, *args) for group in groups for rank in range(group.size)]


def call_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Call a method of every worker of some groups. Return the results by group and rank."""
    return groups[0].gather(submit_each(groups, method, *args))
