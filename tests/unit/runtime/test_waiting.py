# SPDX-License-Identifier: Apache-2.0
"""Waits over calls that a table answers, so that who fails when is written down in the test."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tandem.api import WorkerLost
from tandem.errors import UserError
from tandem.runtime.failure import (
    Kind,
    NodeFailure,
    ReportedError,
    Symptom,
    WorkerFailure,
    WorkerName,
)
from tandem.runtime.waiting import Call, ClosedError, Waits, Worker
from tests.fakes.patience import PATIENCE_S, sooner_than

GRACE_S = 0.2
LONG_GRACE_S = 3.0
"""The grace of tests in which a cause shows after its consequences, however busy the machine is."""
LATER_S = 0.05
DIED = Symptom(Kind.DIED, "killed", "last words", 0)
RAISED = Symptom(Kind.RAISED, "ValueError: x", "", 2)
LOST = Symptom(Kind.LOST_PEER, "RuntimeError: closed by peer", "", 1)


class Answers:
    """References are strings; what they refer to arrives when it is put here."""

    def __init__(self) -> None:
        self.arrived: dict[str, Any] = {}
        self._changed = threading.Condition()

    def put(self, **answers: Any) -> None:
        with self._changed:
            self.arrived |= answers
            self._changed.notify_all()

    def later(self, delay_s: float, **answers: Any) -> None:
        threading.Timer(delay_s, self.put, kwargs=answers).start()

    def finished(self, references: Sequence[str], timeout_s: float) -> list[str]:
        def there() -> list[str]:
            return [reference for reference in references if reference in self.arrived]

        with self._changed:
            self._changed.wait_for(there, timeout_s)
            return there()

    def result(self, reference: str) -> Any:
        answer = self.arrived[reference]
        if isinstance(answer, Symptom):
            raise ReportedError(answer)
        return answer


def two_workers(grace_s: float = GRACE_S) -> tuple[Answers, Waits, list[Worker]]:
    answers = Answers()
    waits = Waits(answers.finished, answers.result, grace_s=grace_s, look_s=0.05)
    workers = [
        Worker(WorkerName("train", rank, host="a", pid=rank), f"watch{rank}") for rank in range(2)
    ]
    for worker in workers:
        waits.watch(worker)
    return answers, waits, workers


def start(waits: Waits, workers: list[Worker]) -> list[Call]:
    return [
        waits.started(worker, "update", reference=f"call{i}") for i, worker in enumerate(workers)
    ]


def test_results_come_in_the_order_of_the_calls() -> None:
    answers, waits, workers = two_workers()
    calls = start(waits, workers)
    answers.put(call1="b")
    answers.later(0.05, call0="a")
    assert waits.gather(calls) == ["a", "b"]
    assert waits.gather([]) == []


def test_first_is_the_lowest_that_is_finished() -> None:
    answers, waits, workers = two_workers()
    calls = start(waits, workers)
    answers.later(0.05, call1="b")
    assert waits.first(calls) == 1
    answers.put(call0="a")
    assert waits.first(calls) == 0


@pytest.mark.parametrize(
    ("now", "later", "rank"),
    [
        ({"call0": LOST}, {"watch1": DIED, "call1": DIED}, 1),
        ({"call0": LOST}, {"call1": RAISED}, 1),
        ({"call0": RAISED}, {"call1": LOST}, 0),
        ({"watch0": DIED, "call0": DIED}, {"call1": LOST}, 0),
    ],
)
def test_first_cause_may_show_after_its_consequences(
    now: dict[str, Symptom], later: dict[str, Symptom], rank: int
) -> None:
    answers, waits, workers = two_workers(LONG_GRACE_S)
    calls = start(waits, workers)
    answers.put(**now)
    answers.later(LATER_S, **later)
    with pytest.raises(WorkerFailure) as raised:
        waits.gather(calls)
    assert (raised.value.rank, raised.value.method) == (rank, "update")


def test_failure_comes_although_a_peer_hangs() -> None:
    answers, waits, workers = two_workers()
    calls = start(waits, workers)
    answers.put(call1=RAISED)
    with sooner_than():
        with pytest.raises(WorkerFailure) as raised:
            waits.gather(calls)
        assert raised.value.rank == 1


def test_death_of_a_worker_that_nobody_called_ends_every_wait() -> None:
    answers, waits, workers = two_workers()
    call = waits.started(workers[0], "update", reference="call0")
    answers.later(0.05, watch1=DIED)
    with pytest.raises(WorkerFailure) as raised:
        waits.first([call])
    assert raised.value.rank == 1
    assert "last words" in str(raised.value)
    answers.put(call0="done")
    with pytest.raises(WorkerFailure, match="train rank 1"):
        waits.gather([call])


def test_death_names_the_call_the_worker_was_busy_with() -> None:
    answers, waits, workers = two_workers()
    done = waits.started(workers[0], "add", reference="done")
    busy = waits.started(workers[0], "advance", reference="busy")
    queued = waits.started(workers[0], "transfer", reference="queued")
    answers.put(done="fine", busy=DIED, queued=DIED, watch0=DIED)
    with pytest.raises(WorkerFailure) as raised:
        waits.gather([queued])
    assert raised.value.method == "advance"
    assert (done.number, busy.number) == (0, 1)


def test_the_end_of_the_node_is_the_cause_of_the_end_of_its_workers() -> None:
    answers, ends = Answers(), [""]
    waits = Waits(
        answers.finished, answers.result, grace_s=GRACE_S, look_s=0.05, node_end=lambda: ends[0]
    )
    workers = [Worker(WorkerName("train", rank, host="a", pid=rank), f"w{rank}") for rank in (0, 1)]
    for worker in workers:
        waits.watch(worker)
    calls = start(waits, workers)
    threading.Timer(0.1, ends.__setitem__, (0, "its raylet was killed")).start()
    with pytest.raises(NodeFailure, match="its raylet was killed"):  # although no call has ended
        waits.gather(calls)
    answers.put(call0=LOST, w1=DIED, call1=DIED)
    with pytest.raises(NodeFailure, match="its raylet was killed"):
        waits.gather(calls)


def test_threads_that_fail_of_the_same_cause_name_the_same_worker() -> None:
    answers, waits, workers = two_workers(LONG_GRACE_S)
    calls = start(waits, workers)
    ranks: list[int] = []

    def gather(call: Call) -> None:
        with pytest.raises(WorkerFailure) as raised:
            waits.gather([call])
        ranks.append(raised.value.rank)

    threads = [threading.Thread(target=gather, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    answers.put(call0=LOST)
    answers.later(LATER_S, call1=DIED, watch1=DIED)
    for thread in threads:
        thread.join(PATIENCE_S)
    assert ranks == [1, 1]


def test_user_error_of_a_worker_is_raised_as_one() -> None:
    answers, waits, workers = two_workers()
    calls = start(waits, workers)
    answers.put(call0=Symptom(Kind.RAISED, "a=1: no.", "", 0, is_user_error=True), call1="ok")
    with pytest.raises(UserError, match="a=1: no"):
        waits.gather(calls)


def test_closing_ends_waits() -> None:
    _, waits, workers = two_workers()
    calls = start(waits, workers)
    threading.Timer(0.05, waits.close).start()
    with pytest.raises(ClosedError):
        waits.gather(calls)


def test_closed_waits_are_left_before_references_end_and_none_begins() -> None:
    answers = Answers()
    asked, may_go_on = threading.Event(), threading.Event()
    after_the_end: list[str] = []
    has_ended = threading.Event()

    def finished(references: Sequence[str], timeout_s: float) -> list[str]:
        asked.set()
        may_go_on.wait()
        after_the_end.extend(references if has_ended.is_set() else [])
        return []

    waits = Waits(finished, answers.result)
    waits.watch(Worker(WorkerName("train", 0, host="a", pid=1), "watch"))
    outcome: list[type[BaseException]] = []

    def wait() -> None:
        with pytest.raises(ClosedError) as caught:
            waits.until_death()
        outcome.append(caught.type)

    def end() -> None:
        waits.until_left()
        has_ended.set()

    waiter, ender = threading.Thread(target=wait), threading.Thread(target=end)
    waiter.start()
    asked.wait()
    waits.close()
    ender.start()
    assert not has_ended.wait(0.05)
    may_go_on.set()
    for thread in (waiter, ender):
        thread.join(5)
    assert has_ended.is_set()
    assert outcome == [ClosedError]
    asked.clear()
    with pytest.raises(ClosedError):
        waits.until_death()
    assert not asked.is_set()
    assert not after_the_end


def test_wait_with_a_limit_ends() -> None:
    _, waits, workers = two_workers()
    with pytest.raises(TimeoutError):
        waits.gather(start(waits, workers), timeout_s=0.05)


def replaceable_second(grace_s: float = GRACE_S) -> tuple[Answers, Waits, list[Worker]]:
    answers, waits, workers = two_workers(grace_s)
    waits.allow_end(workers[1])
    return answers, waits, workers


def test_the_end_of_a_replaceable_worker_fails_its_own_calls_only() -> None:
    answers, waits, workers = replaceable_second()
    calls = start(waits, workers)
    answers.put(call0="a", watch1=DIED, call1=DIED)
    assert waits.gather(calls[:1]) == ["a"]
    assert waits.first(calls) == 0
    with pytest.raises(WorkerLost) as lost:
        waits.gather(calls[1:])
    assert lost.value.rank == 1
    assert str(lost.value.failure).startswith("train rank 1 (host a, pid 1) died in update: killed")
    waits.forget(workers[1])
    following = waits.started(workers[0], "update", reference="later")
    answers.put(later="b")
    assert waits.gather([following]) == ["b"], "it left nothing behind"


@pytest.mark.parametrize("first", ["a peer", "the worker"])
def test_peers_that_fail_because_of_a_lost_worker_are_not_the_cause(first: str) -> None:
    answers, waits, workers = replaceable_second(LONG_GRACE_S)
    calls = start(waits, workers)
    now, later = {"call0": LOST}, {"watch1": DIED, "call1": DIED}
    if first == "the worker":
        now, later = later, now
    answers.put(**now)
    answers.later(LATER_S, **later)
    with pytest.raises(WorkerLost):
        waits.gather(calls)


def test_the_end_of_another_worker_ends_the_run_although_one_is_lost() -> None:
    answers, waits, workers = replaceable_second()
    calls = start(waits, workers)
    answers.put(watch1=DIED, call1=DIED, watch0=DIED, call0=DIED)
    for _ in range(2):
        with pytest.raises(WorkerFailure, match="train rank 0"):
            waits.gather(calls)


def test_a_lost_worker_is_no_cause_for_those_who_do_not_wait_for_it() -> None:
    answers, waits, workers = replaceable_second()
    calls = start(waits, workers)
    answers.put(watch1=DIED, call1=DIED, call0=RAISED)
    with pytest.raises(WorkerFailure, match="train rank 0 .* failed in update: ValueError: x"):
        waits.gather(calls[:1])


def test_a_replaceable_worker_that_hangs_is_killed_and_its_cause_is_told() -> None:
    answers = Answers()
    killed: list[Worker] = []

    def kill(worker: Worker) -> None:
        killed.append(worker)
        answers.put(watch=DIED, call=DIED)

    waits = Waits(answers.finished, answers.result, grace_s=GRACE_S, look_s=0.05, kill=kill)
    worker = Worker(WorkerName("generate", 0, host="a", pid=1), "watch")
    waits.allow_end(worker)
    call = waits.started(worker, "advance", reference="call")
    hanging = Symptom(Kind.HANGS, "no sign of life for 10 s", "", 0)
    threading.Timer(0.05, waits.hangs, (worker, hanging)).start()
    with pytest.raises(WorkerLost) as lost:
        waits.gather([call])
    assert killed == [worker]
    assert "hangs in advance: no sign of life for 10 s" in str(lost.value.failure)
