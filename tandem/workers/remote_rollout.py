# SPDX-License-Identifier: Apache-2.0
"""The driver's rollout over worker processes, and the route of weights to them.

Each engine gets its own requests and advances independently of the others. The requests of a worker
that is lost go to the others, if lost workers are replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from tandem.api import WorkerGroup, WorkerLost
from tandem.types import Completion, EngineWork, GenerationRequest
from tandem.workers.calls import SUBMITTING, call_each, submit_each
from tandem.workers.replacement import Replacements


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
    engines are divided among them. A further turn of a sample goes to the engine that drew the last
    one and may have kept its cache, unless that has a quarter more to do than another. The choice
    depends only on the order of requests if the caller waits for each batch, and no token depends
    on it, because each sample has its own draws. Each engine runs one call ahead of the collected
    results, independently of the others. All workers of an engine get the same calls, and each
    returns the results that no other one returns.
    """

    def __init__(
        self,
        group: WorkerGroup,
        route: WeightRoute,
        *,
        ranks_per_engine: int = 1,
        replacements: Replacements | None = None,
    ) -> None:
        self._group = group
        self._route = route
        self._num_ranks = ranks_per_engine
        self._replacements = replacements or Replacements(group, route.linked, max_restarts=0)
        num_engines = group.size // ranks_per_engine
        self._requests: list[dict[int, GenerationRequest]] = [{} for _ in range(num_engines)]
        self._loads: list[float] = [0] * num_engines  # the numbers of requests; inf: no weights
        self._homes: dict[int, int] = {}
        self._unplaced: list[GenerationRequest] = []
        self._added: list[list[Any]] = [[] for _ in range(num_engines)]
        self._advancing: dict[int, list[Any]] = {}
        self._finished: list[Completion] = []
        self._wanted_version: int | None = None
        self._versions = [-1] * num_engines
        self._swaps: dict[int, list[Any]] = {}
        self._late: list[Any] = []
        self._is_held = False
        self._counters: list[Mapping[str, float]] = [{}] * num_engines
        self._earlier: list[Mapping[str, float]] = []

    def work(self) -> list[EngineWork]:
        """Return the state of each engine. An engine with an uncollected call needs no new one."""
        return [self._work_of(engine) for engine in range(len(self._requests))]

    def lacks_weights(self) -> bool:
        """Return whether every engine was lost since the last version came into use."""
        return min(self._loads) == inf

    def _submit(self, engine: int, method: str, /, *args: Any) -> list[Any]:
        """Start a call on every worker of an engine, the first of them first."""
        first = engine * self._num_ranks
        with SUBMITTING:
            return [
                self._group.submit(rank, method, *args)
                for rank in range(first, first + self._num_ranks)
            ]

    def _work_of(self, engine: int) -> EngineWork:
        if engine in self._advancing:
            return EngineWork.UNDER_WAY
        has_work = self._requests[engine] and not self._is_held
        return EngineWork.NEXT if has_work else EngineWork.NONE

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests, each at the engine with the fewest unfinished sequences.

        A part of a divided request ends where its engine has its share of all new samples.
        """
        if self.lacks_weights():
            self._unplaced += requests
            return
        num_idle = self._loads.count(0)
        num_samples = sum(len(request.sample_ids) for request in requests)
        is_divided = len(requests) < num_idle
        share = -(-num_samples // max(num_idle, 1))
        dealt: list[list[GenerationRequest]] = [[] for _ in self._loads]
        for request in requests:
            ids = request.sample_ids
            while ids:
                engine = self._engine_for(request)
                mine = self._requests[engine]
                room = max(share - len(mine), 1) if is_divided else len(ids)
                part = replace(request, sample_ids=ids[:room])
                dealt[engine].append(part)
                mine.update(dict.fromkeys(part.sample_ids, part))
                self._loads[engine] = len(mine)
                if request.continues:
                    self._leave_homes(part.sample_ids, engine)
                    self._homes.update(dict.fromkeys(part.sample_ids, engine))
                ids = ids[room:]
        for engine, mine in enumerate(dealt):
            if mine:
                self._added[engine] += self._submit(engine, "add", mine)

    def _engine_for(self, request: GenerationRequest) -> int:
        """Return the engine for a request, or for the rest of it."""
        least = min(self._loads)
        home = self._homes.get(request.sample_ids[0]) if request.first_index else None
        if home is not None and self._loads[home] <= least + max(least // 4, 1):
            return home
        return self._loads.index(least)

    def _leave_homes(self, sample_ids: Sequence[int], engine: int) -> None:
        """Let other engines free what they keep of samples that go on at ``engine``."""
        self.forget([x for x in sample_ids if self._homes.get(x, engine) != engine])

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Let engines free what they keep of samples that have ended or left."""
        ended: dict[int, list[int]] = {}
        for sample_id in sample_ids:
            engine = self._homes.pop(sample_id, None)
            if engine is not None and self._loads[engine] < inf:  # a new process keeps nothing
                ended.setdefault(engine, []).append(sample_id)
        for engine, mine in ended.items():
            self._added[engine] += self._submit(engine, "forget", mine)

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Return the completions of the first engine that answers; see ``api.Rollout``.

        It also returns [] if the last engine with weights was lost.
        """
        while True:
            try:
                return self._advance(max_steps)
            except WorkerLost as lost:
                self._replace(lost)

    def _advance(self, max_steps: int | None) -> list[Completion]:
        for engine, requests in enumerate(self._requests):
            if requests and engine not in self._advancing and not self._is_held:
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
        results = self._group.gather(calls)[-self._num_ranks :]
        completions: list[Completion] = [one for finished, _ in results for one in finished]
        self._counters[engine] = _sums([counters for _, counters in results])
        for completion in completions:
            del self._requests[engine][completion.sample_id]
        self._loads[engine] = len(self._requests[engine])
        if engine in self._swaps:
            self._versions[engine] = min(self._group.gather(self._swaps.pop(engine)))
        return completions

    def settle(self) -> None:
        """Wait for every engine that advances, and keep its completions."""
        while self._advancing:
            try:
                self._finished += self._collect(next(iter(self._advancing)))
            except WorkerLost as lost:
                self._replace(lost)

    def _replace(self, lost: WorkerLost) -> None:
        """Start another process in place of a lost one, and deal its samples to the others.

        They have the version in use. A sample whose call was lost may have been generated already:
        it is generated again, and has the same tokens. If there are no others, samples wait for
        weights.
        """
        engine = lost.rank
        self._loads[engine] = inf
        self._homes = {one: home for one, home in self._homes.items() if home != engine}
        unfinished, self._requests[engine] = self._requests[engine], {}
        self._replacements.start(lost, num_unfinished=len(unfinished))
        self._advancing.pop(engine, None)
        self._added[engine] = []
        self._earlier.append(self._counters[engine])
        self._counters[engine] = {}
        self.add(_requests_of(unfinished))

    def metrics(self) -> Mapping[str, float]:
        """Return the sums of the engines' counters as of each one's last collected call."""
        counters = [*self._counters, *self._earlier]
        if self._replacements.is_possible:
            counters.append({"num_restarts": self._replacements.num_restarts})
        return _sums(counters)

    def set_weights_version(self, version: int) -> bool:
        """Put ``version`` into use; see ``api.Rollout``.

        An engine switches between two of its advances. Without staging all engines switch together,
        and none starts another advance before.
        """
        if not self._route.is_staged:
            self._is_held = bool(self._advancing)
            if self._is_held:
                return False
            self._transfer(version)
            return True
        self._wanted_version = version
        busy = [self._versions[rank] for rank, mine in enumerate(self._requests) if mine]
        if busy and min(busy) < version:
            return False
        self._group.gather(self._late)
        self._late = submit_each(self._route.scoring, "swap", version)
        call_each([self._group], "swap", version)
        self._wanted_version = None
        return True

    def _transfer(self, version: int) -> None:
        """Send a version to all engines, those that replace others among them."""
        while True:
            try:
                self._replacements.transfer(version)
            except WorkerLost as lost:
                self._replace(lost)
            else:
                break
        self._loads = [len(mine) for mine in self._requests]
        unplaced, self._unplaced = self._unplaced, []
        self.add(unplaced)


def _sums(counters: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    names = dict.fromkeys(name for one in counters for name in one)
    return {name: sum(one.get(name, 0.0) for one in counters) for name in names}


def _requests_of(samples: Mapping[int, GenerationRequest]) -> list[GenerationRequest]:
    """Return the requests of these samples, which may be a part of each request's samples."""
    ids: dict[int, list[int]] = {}
    requests: dict[int, GenerationRequest] = {}
    for sample_id, request in samples.items():
        requests[id(request)] = request
        ids.setdefault(id(request), []).append(sample_id)
    return [replace(one, sample_ids=tuple(ids[key])) for key, one in requests.items()]


class RemoteStage:
    """An ``api.WeightStage`` over the pools of the weight link.

    Its calls run while the rollout generates.
    """

    def __init__(self, groups: Sequence[WorkerGroup]) -> None:
        self._groups = groups

    def stage(self, version: int) -> None:
        """Send the trainer's weights as ``version``; see ``api.WeightStage``."""
        call_each(self._groups, "transfer", version)
