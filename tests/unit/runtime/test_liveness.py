# SPDX-License-Identifier: Apache-2.0
"""Workers that answer, that do not, and that answer while they do nothing."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from tandem.runtime.failure import Kind, ReportedError, Symptom, WorkerFailure, WorkerName
from tandem.runtime.liveness import CallMonitor, Heartbeat, Limits, Liveness
from tandem.runtime.waiting import ClosedError, Waits, Worker

LIMITS = Limits(timeout_s=0.2)
SILENT = None
DIED = Symptom(Kind.DIED, "killed", "", 0)
Answer = Callable[[int], Heartbeat | Symptom | None]
"""From the number of the question, from 0."""


def computing(number: int) -> Heartbeat:
    return Heartbeat(cpu_s=0.1 * number, stack="line 1")


def idle(number: int) -> Heartbeat:
    return Heartbeat()


def stuck(number: int) -> Heartbeat:
    return Heartbeat(cpu_s=7.0, stack=f"line {min(number, 3)}")


def stopped(number: int) -> Heartbeat | None:
    return computing(number) if number < 2 else SILENT


def killed(number: int) -> Heartbeat | Symptom:
    return DIED


@contextmanager
def watched(*answers: Answer) -> Iterator[tuple[Waits, list[Worker]]]:
    """Workers that answer so; nothing else ever finishes."""
    numbers = [itertools.count() for _ in answers]

    def finished(references: Sequence[object], timeout_s: float) -> list[object]:
        time.sleep(min(timeout_s, 0.01))
        return [r for r in references if isinstance(r, (Heartbeat, Symptom))]

    def result(reference: object) -> Heartbeat:
        if isinstance(reference, Symptom):
            raise ReportedError(reference)
        assert isinstance(reference, Heartbeat)
        return reference

    waits = Waits(finished, result)
    liveness = Liveness(waits, finished=finished, result=result, limits=LIMITS)
    workers = [
        Worker(WorkerName("train", rank, host="a", pid=rank), f"watch{rank}")
        for rank in range(len(answers))
    ]

    def asking(rank: int) -> Callable[[], object]:
        return lambda: answers[rank](next(numbers[rank])) or "no answer"

    for worker in workers:
        waits.watch(worker)
    liveness.start({worker: asking(rank) for rank, worker in enumerate(workers)})
    try:
        yield waits, workers
    finally:
        liveness.close()


def test_a_stopped_worker_is_named_with_the_call_it_was_busy_with() -> None:
    with watched(computing, stopped) as (waits, workers):
        calls = [waits.started(worker, "update", reference=f"c{worker}") for worker in workers]
        waits.started(workers[1], "save", reference="queued")
        with pytest.raises(WorkerFailure) as raised:
            waits.gather(calls)
        assert (raised.value.rank, raised.value.method) == (1, "update")
        assert "train rank 1 (host a, pid 1) hangs in update: no sign of life for 0.1 s" in str(
            raised.value
        )
        with pytest.raises(WorkerFailure, match="rank 1"):
            waits.until_death()


def test_a_stopped_worker_that_nobody_called_ends_the_run_too() -> None:
    with watched(stopped) as (waits, _), pytest.raises(WorkerFailure) as raised:
        waits.until_death()
    assert raised.value.method == ""


def test_a_worker_that_is_stuck_says_where() -> None:
    started_s = time.monotonic()
    with watched(computing, stuck) as (waits, workers):
        with pytest.raises(WorkerFailure, match="it has not computed for 0.22 s") as raised:
            waits.gather([waits.started(workers[1], "advance", reference="c")])
        assert time.monotonic() - started_s > LIMITS.stillness_s
    assert (raised.value.rank, raised.value.traceback_text) == (1, "line 3")


def test_those_that_compute_or_have_nothing_to_do_are_left_alone() -> None:
    with watched(computing, idle, killed) as (waits, workers):
        call = waits.started(workers[0], "update", reference="c")
        with pytest.raises(TimeoutError):
            waits.gather([call], timeout_s=2 * LIMITS.stillness_s)


def test_a_driver_that_was_stopped_does_not_blame_its_workers() -> None:
    """Its looks are far apart, and each finds the answer to the question before."""
    looks: list[float] = []

    def finished(references: Sequence[int], timeout_s: float) -> list[int]:
        looks.append(time.monotonic())
        time.sleep(1.5 * LIMITS.silence_s)
        if len(looks) == 4:
            waits.close()
        return [r for r in references if len(looks) % 2 == 0]

    def nothing(references: Sequence[object], timeout_s: float) -> list[object]:
        time.sleep(0.01)
        return []

    waits = Waits(nothing, lambda reference: None)
    liveness = Liveness(waits, finished=finished, result=lambda r: Heartbeat(), limits=LIMITS)
    worker = Worker(WorkerName("train", 0, host="a", pid=0), "watch")
    liveness.start({worker: lambda: 0})
    with pytest.raises(ClosedError):
        waits.until_death()
    liveness.close()


def test_a_heartbeat_tells_a_call_that_waits_from_one_that_computes() -> None:
    clock = CallMonitor()
    assert clock.heartbeat() == Heartbeat()
    ending = threading.Event()

    def wait_for_ever() -> None:
        ending.wait()

    def compute_for_ever() -> None:
        while not ending.is_set():
            sum(range(1000))

    def two_heartbeats(
        work: Callable[[], None], until: Callable[[Heartbeat, Heartbeat], bool]
    ) -> tuple[Heartbeat, Heartbeat]:
        """The first of which ``until`` is true, of those taken one after the other."""

        def call() -> None:
            with clock.running():
                work()

        ending.clear()
        thread = threading.Thread(target=call)
        thread.start()
        deadline = time.monotonic() + 10
        first = second = Heartbeat()
        while time.monotonic() < deadline:
            first, second = second, clock.heartbeat()
            if work.__name__ in first.stack and until(first, second):
                break
            time.sleep(0.03)
        ending.set()
        thread.join()
        return first, second

    first, second = two_heartbeats(wait_for_ever, lambda one, other: one == other)
    assert first == second
    assert "ending.wait()" in first.stack
    first, second = two_heartbeats(compute_for_ever, lambda one, other: one.cpu_s != other.cpu_s)
    assert first.cpu_s is not None
    assert second.cpu_s is not None
    assert second.cpu_s > first.cpu_s
    assert clock.heartbeat() == Heartbeat()


def test_a_worker_that_takes_the_place_of_a_lost_one_is_watched_and_the_lost_one_is_not() -> None:
    def finished(references: Sequence[object], timeout_s: float) -> list[object]:
        time.sleep(min(timeout_s, 0.01))
        return []

    waits = Waits(finished, lambda reference: None)
    liveness = Liveness(waits, finished=finished, result=lambda r: Heartbeat(), limits=LIMITS)
    lost, successor = (
        Worker(WorkerName("generate", 0, host="a", pid=pid), f"watch{pid}") for pid in (1, 2)
    )
    liveness.start({lost: lambda: "no answer"})
    liveness.forget(lost)
    liveness.watch(successor, lambda: "no answer")
    with pytest.raises(WorkerFailure) as raised:
        waits.until_death()
    liveness.close()
    assert raised.value.pid == 2
