# SPDX-License-Identifier: Apache-2.0
"""The rollout over several workers: each goes on by itself, and takes weights when it has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tandem.api import WorkerLost
from tandem.types import (
    Completion,
    EngineWork,
    FinishReason,
    GenerationRequest,
    SamplingParams,
)
from tandem.workers.remote_rollout import RemoteRollout, RemoteStage, WeightRoute
from tandem.workers.replacement import Replacements

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8)


@dataclass
class Group:
    """``api.WorkerGroup`` of workers that do each call when its result is asked for.

    A worker finishes one sequence an advance. What was sent to it arrives after ``delay`` swaps
    that did not wait. Only the first of each run of ``leaders`` workers draws something.
    """

    size: int
    delay: int = 0
    leaders: int = 1
    called: list[tuple[Any, ...]] = field(default_factory=list[tuple[Any, ...]])
    waiting: dict[int, deque[int]] = field(default_factory=dict[int, deque[int]])
    arriving: int = -1
    in_use: dict[int, int] = field(default_factory=dict[int, int])
    asked: dict[int, int] = field(default_factory=dict[int, int])
    num_advances: dict[int, int] = field(default_factory=dict[int, int])

    def submit(self, rank: int, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Note the call."""
        self.called.append((rank, method, *args))
        return (self, rank, method, args)

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """Do them."""
        return [getattr(group, method)(rank, *args) for group, rank, method, args in calls]

    def first(self, calls: Sequence[Any]) -> int:
        """The last one."""
        return len(calls) - 1

    def add(self, rank: int, requests: Sequence[GenerationRequest]) -> None:
        """Of a worker."""
        ids = [i for request in requests for i in request.sample_ids]
        self.waiting.setdefault(rank, deque()).extend(ids)

    def forget(self, rank: int, sample_ids: Sequence[int]) -> None:
        """Of a worker."""

    def advance(
        self, rank: int, max_steps: int | None
    ) -> tuple[list[Completion], Mapping[str, float]]:
        """Of a worker."""
        sample_id = self.waiting[rank].popleft()
        if rank % self.leaders:
            return [], {}
        version = self.in_use.get(rank, 0)
        self.num_advances[rank] = self.num_advances.get(rank, 0) + 1
        completion = Completion(sample_id, (1,), (-1.0,), FinishReason.STOP, version)
        return [completion], {"num_advances": self.num_advances[rank]}

    def transfer(self, rank: int, version: int) -> None:
        """Of a worker."""
        self.arriving = version
        self.asked[rank] = 0

    def swap(self, rank: int, version: int | None = None) -> int:
        """Of a worker."""
        self.asked[rank] = self.asked.get(rank, 0) + 1
        if version is not None or self.asked[rank] > self.delay:
            self.in_use[rank] = self.arriving
        return self.in_use.get(rank, 0)


def request(*sample_ids: int) -> GenerationRequest:
    return GenerationRequest(sample_ids, (1, 2), SAMPLING)


def test_requests_go_to_the_worker_with_the_least_to_do() -> None:
    group = Group(2)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(0, 1, 2), request(3), request(4)])
    while completions := rollout.advance(32):
        assert len(completions) == 1
    added = [(rank, [r.sample_ids for r in mine]) for rank, method, mine in _of(group, "add")]
    assert added == [(0, [(0, 1, 2)]), (1, [(3,), (4,)])]
    assert {max_steps for _, _, max_steps in _of(group, "advance")} == {32}


def test_further_turns_go_to_the_engine_that_keeps_their_cache_and_so_do_their_ends() -> None:
    group = Group(3)
    rollout = RemoteRollout(group, WeightRoute([group]))
    first = [replace(request(sample_id), continues=True) for sample_id in range(6)]
    rollout.add(first)
    while rollout.advance(32):
        pass
    further = [replace(one, first_index=2) for one in first]
    rollout.add([further[5], further[4], further[2]])
    added = {r.sample_ids[0]: rank for rank, _, mine in _of(group, "add") for r in mine}
    assert added == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}
    group.called.clear()
    rollout.add([request(*range(10, 20)), further[0]])
    added = {r.sample_ids[0]: rank for rank, _, mine in _of(group, "add") for r in mine}
    assert added == {10: 0, 0: 1}, "its own engine has far more to do"
    assert [(rank, ids) for rank, _, ids in _of(group, "forget")] == [(0, [0])], "which it leaves"
    group.called.clear()
    rollout.forget([0, 1, 3, 77])
    assert [(rank, ids) for rank, _, ids in _of(group, "forget")] == [(1, [0, 1]), (0, [3])]


def test_all_workers_of_an_engine_get_the_same_calls_and_the_first_one_answers() -> None:
    group = Group(4, leaders=2)
    rollout = RemoteRollout(group, WeightRoute([group]), ranks_per_engine=2)
    assert rollout.work() == [EngineWork.NONE, EngineWork.NONE]
    rollout.add([request(0, 1), request(2)])
    found: list[int] = []
    while completions := rollout.advance(32):
        found += [completion.sample_id for completion in completions]
    assert sorted(found) == [0, 1, 2]
    for first in (0, 2):
        mine, others = (
            [call[1:] for call in group.called if call[0] == rank] for rank in (first, first + 1)
        )
        assert mine == others
    assert rollout.metrics() == {"num_advances": 3.0}, (
        "an engine's counters, not those of its ranks"
    )


def test_workers_of_an_engine_that_draw_sequences_of_their_own_all_answer() -> None:
    group = Group(2)
    rollout = RemoteRollout(group, WeightRoute([group]), ranks_per_engine=2)
    rollout.add([request(0), request(1)])
    group.add = lambda rank, requests: group.waiting.setdefault(rank, deque()).append(rank)
    assert sorted(one.sample_id for one in rollout.advance(32)) == [0, 1]
    assert rollout.metrics() == {"num_advances": 2.0}
    assert rollout.advance(32) == []


def parts_of(group: Group) -> list[list[tuple[int, ...]]]:
    """The parts of requests that each worker was given."""
    given: list[list[tuple[int, ...]]] = [[] for _ in range(group.size)]
    for rank, _, mine in _of(group, "add"):
        given[rank] += [r.sample_ids for r in mine]
    return given


def test_fewer_requests_than_idle_workers_are_divided_evenly() -> None:
    group = Group(4)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(*range(5)), request(*range(5, 10)), request(*range(10, 15))])
    parts = parts_of(group)
    assert sorted(i for mine in parts for ids in mine for i in ids) == list(range(15))
    assert sorted(sum(map(len, mine)) for mine in parts) == [3, 4, 4, 4]
    collected: list[int] = []
    while completions := rollout.advance(32):
        collected += [completion.sample_id for completion in completions]
    assert sorted(collected) == list(range(15))


def test_a_request_stays_whole_while_no_worker_is_idle() -> None:
    group = Group(2)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(0, 1), request(2, 3)])
    rollout.add([request(*range(4, 9))])
    assert parts_of(group) == [[(0, 1), (4, 5, 6, 7, 8)], [(2, 3)]]


def test_without_staging_all_pools_take_weights_at_once() -> None:
    generating, training = Group(2), Group(1)
    rollout = RemoteRollout(generating, WeightRoute([training, generating]))
    rollout.add([request(0, 1)])
    assert rollout.set_weights_version(3)
    for group in (generating, training):
        assert [call[2] for call in _of(group, "transfer")] == [3] * group.size
    assert generating.in_use == {0: 3, 1: 3}


def test_staged_weights_are_taken_by_each_worker_between_two_of_its_advances() -> None:
    generating, training, scoring = Group(2, delay=1), Group(1), Group(1)
    linked = [training, generating, scoring]
    route = WeightRoute(linked, [scoring], is_staged=True)
    rollout, stage = RemoteRollout(generating, route), RemoteStage(linked)
    rollout.add([request(*range(6)), request(*range(6, 12))])
    stage.stage(1)
    drawn_by: list[int] = []
    num_asked = 1
    while not rollout.set_weights_version(1):
        drawn_by += [c.weights_version for c in rollout.advance(32)]
        num_asked += 1
    assert drawn_by and set(drawn_by) <= {0, 1} and drawn_by[0] == 0
    assert num_asked > 3
    assert generating.in_use == {0: 1, 1: 1}
    assert _of(scoring, "swap") == [(0, "swap", 1)]
    assert not _of(training, "swap"), "nobody waits for the trainer"


def test_staged_weights_are_waited_for_without_work() -> None:
    generating, training = Group(2, delay=1000), Group(1)
    route = WeightRoute([training, generating], is_staged=True)
    rollout = RemoteRollout(generating, route)
    RemoteStage(route.linked).stage(4)
    assert rollout.set_weights_version(4)
    assert generating.in_use == {0: 4, 1: 4}


@dataclass
class QuickGroup(Group):
    """Whatever is asked has ended before the driver looks."""

    def first(self, calls: Sequence[Any]) -> int:
        """The lowest of several, as ``api.WorkerGroup`` says."""
        return 0


def test_no_worker_waits_for_the_others_to_run_dry() -> None:
    group = QuickGroup(3)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(0, 1), request(2, 3), request(4, 5)])
    collected = [rollout.advance(32)[0].sample_id for _ in range(6)]
    assert collected == [0, 2, 4, 1, 3, 5]


def test_each_worker_tells_what_it_has_to_do() -> None:
    none, next_, under_way = EngineWork.NONE, EngineWork.NEXT, EngineWork.UNDER_WAY
    group = QuickGroup(3)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(0), request(1)])
    assert rollout.work() == [next_, next_, none]
    rollout.advance(32)
    assert rollout.work() == [none, under_way, none], "the first was collected from"
    while rollout.advance(32):
        pass
    assert rollout.work() == [none] * 3


def test_counters_of_all_workers_are_added_up() -> None:
    rollout = RemoteRollout(group := QuickGroup(2), WeightRoute([group]))
    assert rollout.metrics() == {}
    rollout.add([request(0, 1, 2), request(3)])
    while rollout.advance(32):
        pass
    assert rollout.metrics() == {"num_advances": 4}


def test_what_has_settled_comes_with_the_next_advances() -> None:
    rollout = RemoteRollout(group := Group(2), WeightRoute([]))
    rollout.add([request(1), request(2), request(3), request(4)])
    (first,) = rollout.advance()
    assert EngineWork.UNDER_WAY in rollout.work()
    rollout.settle()
    assert rollout.work().count(EngineWork.UNDER_WAY) == 0
    num_calls = len(group.called)
    rollout.settle()
    assert len(group.called) == num_calls
    found = {first.sample_id}
    while len(found) < 4:
        found |= {completion.sample_id for completion in rollout.advance()}
    assert found == {1, 2, 3, 4}
    assert rollout.advance() == []


def test_without_staging_what_is_under_way_is_collected_before_weights_come() -> None:
    """It would be computed before them anyway, and its worker would seem to go on meanwhile."""
    group = QuickGroup(2)
    rollout = RemoteRollout(group, WeightRoute([group]))
    rollout.add([request(0, 1), request(2, 3)])
    rollout.advance(32)
    assert not rollout.set_weights_version(1)
    assert rollout.work() == [EngineWork.NONE, EngineWork.UNDER_WAY]
    assert [c.weights_version for c in rollout.advance(32)] == [0]
    assert not _of(group, "transfer")
    assert rollout.set_weights_version(1)
    assert rollout.work() == [EngineWork.NEXT] * 2
    assert [c.weights_version for c in rollout.advance(32)] == [1]


def _of(group: Group, method: str) -> list[tuple[Any, ...]]:
    return [call for call in group.called if call[1] == method]


@dataclass
class MortalGroup(QuickGroup):
    """A group whose workers end at a call of a method. Later calls of such a worker fail.

    Attributes:
        ends: the methods of which the next call ends a worker, with its rank.
    """

    ends: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    dead: set[int] = field(default_factory=set[int])
    started: list[int] = field(default_factory=list[int])
    joined: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def gather(self, calls: Sequence[Any]) -> list[Any]:
        """Do them, up to the first of a dead worker."""
        results = []
        for group, rank, method, args in calls:
            if (method, rank) in group.ends:
                group.ends.remove((method, rank))
                group.dead.add(rank)
            if rank in group.dead:
                failure = RuntimeError(f"generate rank {rank} died in {method}: killed\nlast words")
                raise WorkerLost(rank, failure)
            results.append(getattr(group, method)(rank, *args))
        return results

    def start_again(self, rank: int) -> None:
        """Note it."""
        self.started.append(rank)
        self.waiting.pop(rank, None)
        self.num_advances.pop(rank, None)

    def until_started(self, rank: int) -> None:
        """The new worker is there."""
        self.dead.discard(rank)

    def join_link(self, rank: int, generation: int) -> None:
        """Of a worker."""
        self.joined.append((rank, generation))


def mortal(size: int, ends: set[tuple[str, int]], *, max_restarts: int = 2) -> Any:
    """Return a rollout whose workers end so, its group, and the pool that trains."""
    group, training = MortalGroup(size, ends=ends), MortalGroup(1)
    linked = [training, group]
    replacements = Replacements(group, linked, max_restarts=max_restarts)
    return RemoteRollout(group, WeightRoute(linked), replacements=replacements), group, training


def collect(rollout: RemoteRollout) -> list[int]:
    found: list[int] = []
    while completions := rollout.advance(32):
        found += [completion.sample_id for completion in completions]
    return found


@pytest.mark.parametrize("method", ["add", "advance"])
def test_samples_of_a_lost_worker_go_to_the_others_until_new_weights_come(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    rollout, group, training = mortal(3, {(method, 1)})
    rollout.add([request(0, 1, 2), request(3, 4, 5), request(6, 7)])
    assert sorted(collect(rollout)) == list(range(8)), "each sample once"
    assert group.started == [1]
    assert "generate rank 1 died in " in caplog.text and "last words" not in caplog.text
    assert "(1 of actor_rollout_ref.rollout.max_engine_restarts=2), and its 3 " in caplog.text
    rollout.add([request(8), request(9), request(10)])
    assert {rank for rank, _, mine in _of(group, "add") if mine[0].sample_ids[0] > 7} == {0, 2}
    collect(rollout)
    assert rollout.set_weights_version(1)
    assert group.joined == [(0, 1), (1, 1), (2, 1)] and training.joined == [(0, 1)]
    rollout.add([request(11), request(12), request(13)])
    assert sorted(collect(rollout)) == [11, 12, 13]
    assert group.in_use == {0: 1, 1: 1, 2: 1}
    assert rollout.metrics()["num_restarts"] == 1
    assert rollout.set_weights_version(2)
    assert len(group.joined) == 3, "nobody was lost since"


def test_counters_of_a_lost_worker_are_kept() -> None:
    rollout, group, _ = mortal(2, set())
    rollout.add([request(0, 1), request(2)])
    assert len(collect(rollout)) == 3
    group.ends.add(("advance", 0))
    rollout.add([request(3), request(4)])
    collect(rollout)
    assert rollout.metrics() == {"num_advances": 5, "num_restarts": 1}


@pytest.mark.parametrize("method", ["transfer", "swap", "join_link"])
def test_a_worker_that_is_lost_in_a_transfer_is_replaced_and_the_transfer_repeated(
    method: str,
) -> None:
    ends = {(method, 0), ("swap" if method == "join_link" else method, 0)}
    num_deaths = len(ends)
    rollout, group, training = mortal(2, ends)
    rollout.add([request(0, 1), request(2, 3)])
    assert rollout.set_weights_version(1)
    assert group.started == [0] * num_deaths
    assert [generation for _, generation in training.joined][-1] == num_deaths
    assert group.in_use == {0: 1, 1: 1}
    assert sorted(collect(rollout)) == [0, 1, 2, 3]


def test_workers_that_are_lost_while_others_settle_are_replaced() -> None:
    rollout, group, _ = mortal(2, set())
    rollout.add([request(0, 1), request(2, 3)])
    found = [completion.sample_id for completion in rollout.advance(32)]
    group.ends.add(("advance", 1))
    rollout.settle()
    assert group.started == [1]
    assert sorted(found + collect(rollout)) == [0, 1, 2, 3]


def test_the_run_ends_with_the_failure_when_no_restart_is_left() -> None:
    rollout, group, _ = mortal(3, {("advance", 0), ("advance", 1)}, max_restarts=1)
    rollout.add([request(0), request(1), request(2)])
    with pytest.raises(RuntimeError, match="generate rank 1 died in advance: killed"):
        collect(rollout)
    assert group.started == [0]


@pytest.mark.parametrize("method", ["add", "advance"])
def test_samples_wait_for_weights_after_the_last_worker_was_lost(method: str) -> None:
    rollout, group, _ = mortal(2, {(method, 0), (method, 1)})
    rollout.add([request(0, 1), request(2)])
    assert rollout.advance(32) == [] and rollout.lacks_weights()
    rollout.add([request(3)])
    assert rollout.advance(32) == []
    assert rollout.work() == [EngineWork.NONE] * 2
    assert rollout.set_weights_version(0) and not rollout.lacks_weights()
    assert sorted(group.started) == [0, 1]
    assert sorted(collect(rollout)) == [0, 1, 2, 3]


def test_a_lost_worker_has_no_states_to_free() -> None:
    rollout, group, _ = mortal(2, {("advance", 0)})
    rollout.add([replace(request(0), continues=True), replace(request(1), continues=True)])
    collect(rollout)
    rollout._homes = {0: 0, 1: 1}
    rollout.forget([0, 1])
    assert [rank for rank, *_ in _of(group, "forget")] == [1]
