# SPDX-License-Identifier: Apache-2.0
"""Waits for calls on workers. They end with the results, or with the first cause of a failure.

Every wait also watches for the end of any worker, even an idle one, unless the worker can be
replaced: its end fails its own calls only. The caller supplies the functions that wait for
references and read them. Several threads may wait at once.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from tandem.api import WorkerLost
from tandem.runtime.failure import (
    Failed,
    Kind,
    NodeFailure,
    ReportedError,
    Symptom,
    WorkerName,
    as_exception,
    first_failed,
)

_LOST_PEER_FACTOR = 3
"""How many times longer the cause is waited for while only its consequences are known."""
_SETTLE_S = 3.0
"""The end of a process may be known this long before the end of its calls."""

_ENDED = Symptom(Kind.DIED, "its process ended", "", time_s=0)

Reference = Any
"""A hashable reference to a result that may not be there yet."""


class ClosedError(Exception):
    """The runtime was closed while a thread waited."""


@dataclass(frozen=True, eq=False)
class Worker:
    """A worker process. ``watch`` refers to a call that only ends with the process."""

    name: WorkerName
    watch: Reference


@dataclass(frozen=True, eq=False)
class Call:
    """A call that has been made. ``number`` orders all calls by when they were made."""

    worker: Worker
    method: str
    reference: Reference
    number: int


class Waits:
    """The calls of a runtime, and the waits for them.

    Args:
        finished: returns the finished references, after waiting at most the given seconds for one.
        result: returns the result of a finished reference, or raises ReportedError.
        grace_s: the time after a failure in which other failures may turn out to be its cause.
        look_s: the period in which a waiting thread checks for ``close`` and for hanging workers.
        node_end: returns how processes that carry workers ended; "" while they run.
        kill: ends the process of a worker that can be replaced and hangs.
    """

    def __init__(
        self,
        finished: Callable[[Sequence[Reference], float], Sequence[Reference]],
        result: Callable[[Reference], Any],
        *,
        grace_s: float = 1.5,
        look_s: float = 1.0,
        node_end: Callable[[], str] = lambda: "",
        kill: Callable[[Worker], None] = lambda worker: None,
    ) -> None:
        self._kill = kill
        self._node_end = node_end
        self._grace_s = grace_s
        self._look_s = look_s
        self._finished = finished
        self._result = result
        self._workers: list[Worker] = []
        self._replaceable: list[Worker] = []
        self._hanging: dict[WorkerName, Symptom] = {}
        self._calls: weakref.WeakSet[Call] = weakref.WeakSet()
        self._numbers = itertools.count()
        self._noting = threading.Lock()
        self._judging = threading.Lock()
        self._first_end: Failed | None = None
        self._last: tuple[float, Failed | None] = (-math.inf, None)
        self._is_closed = False
        self._left = threading.Condition()
        self._num_looking = 0

    def watch(self, worker: Worker) -> None:
        """End every wait from now on if ``worker`` ends."""
        self._workers.append(worker)

    def allow_end(self, worker: Worker) -> None:
        """Raise WorkerLost in waits for calls of ``worker`` if it ends, and end no other wait."""
        if worker in self._workers:
            self._workers.remove(worker)
        self._replaceable.append(worker)

    def forget(self, worker: Worker) -> None:
        """Drop a worker that can be replaced, and its calls."""
        with self._noting:
            own = [call for call in self._calls if call.worker is worker]
            self._calls.difference_update(own)
        self._replaceable.remove(worker)

    def started(self, worker: Worker, method: str, *, reference: Reference) -> Call:
        """Register a call that has just been made."""
        call = Call(worker, method, reference, next(self._numbers))
        with self._noting:
            self._calls.add(call)
        return call

    def gather(self, calls: Sequence[Call], *, timeout_s: float = math.inf) -> list[Any]:
        """Return the results of all calls, in order.

        Raises:
            WorkerFailure: a worker died, or one of the calls raised.
            WorkerLost: the worker of a call has ended and can be replaced.
            UserError: one of the calls raised it.
            TimeoutError: the calls took longer.
        """
        deadline = time.monotonic() + timeout_s
        pending = {call.reference: call for call in calls}
        results: dict[Reference, Any] = {}
        own = {call.worker for call in calls}
        replaceable = [worker for worker in self._replaceable if worker in own]
        try:
            while pending:
                for reference in self._wait(list(pending), deadline, replaceable=replaceable):
                    results[reference] = self._read(pending.pop(reference), replaceable)
        finally:
            with self._noting:
                self._calls.difference_update(calls)
        return [results[call.reference] for call in calls]

    def first(self, calls: Sequence[Call]) -> int:
        """Return the lowest index of a finished call. Raise WorkerFailure if a worker ends."""
        finished = set(self._wait([call.reference for call in calls], math.inf))
        return next(i for i, call in enumerate(calls) if call.reference in finished)

    def hangs(self, worker: Worker, symptom: Symptom) -> bool:
        """End all waits, because ``worker`` hangs; or only the worker, if it can be replaced.

        Returns:
            whether all waits end.
        """
        if worker in self._replaceable:
            self._hanging[worker.name] = symptom
            self._kill(worker)
            return False
        own = {c.reference: c for c in self._started_calls() if c.worker is worker}
        finished = self._finished(list(own), 0) if own else ()
        unfinished = [call for reference, call in own.items() if reference not in finished]
        busy = min(unfinished, key=lambda call: call.number, default=None)
        failed = Failed(worker.name, busy.method if busy else "", symptom)
        with self._judging:
            self._first_end = self._first_end or failed
        return True

    def until_death(self) -> None:
        """Wait until any worker has ended or hangs, then raise WorkerFailure."""
        self._wait([], math.inf)

    def close(self) -> None:
        """End all waits, present and future, with ``ClosedError``."""
        with self._left:
            self._is_closed = True

    def until_left(self) -> None:
        """Wait, after ``close``, until no thread uses a reference any more."""
        with self._left:
            self._left.wait_for(lambda: self._num_looking == 0)

    def _wait(
        self,
        references: Sequence[Reference],
        deadline: float,
        *,
        replaceable: Sequence[Worker] = (),
    ) -> list[Reference]:
        """Wait until at least one reference is finished; return those that are.

        Args:
            replaceable: the workers among those that are waited for that can be replaced.
        """
        watches = [worker.watch for worker in self._workers]
        while (left_s := deadline - time.monotonic()) > 0:
            with self._looking():
                finished = set(self._finished([*references, *watches], min(self._look_s, left_s)))
                has_ended = finished.intersection(watches) or self._first_end is not None
                if (has_ended or self._node_end()) and not self._is_closed:
                    self._raise_first_cause([], replaceable)
            if finished and not self._is_closed:
                return [reference for reference in references if reference in finished]
        raise TimeoutError(f"{len(references)} calls have not finished in time")

    def _read(self, call: Call, replaceable: Sequence[Worker]) -> Any:
        with self._looking():
            try:
                return self._result(call.reference)
            except ReportedError as error:
                self._raise_first_cause([self._failed(call, error.symptom)], replaceable)

    @contextmanager
    def _looking(self) -> Iterator[None]:
        """Count this thread as a user of references. Raise ClosedError after ``close``."""
        with self._left:
            if self._is_closed:
                raise ClosedError("the runtime was closed")
            self._num_looking += 1
        try:
            yield
        finally:
            with self._left:
                self._num_looking -= 1
                self._left.notify_all()

    def _raise_first_cause(self, failures: list[Failed], replaceable: Sequence[Worker]) -> NoReturn:
        with self._judging:  # several threads may fail for one cause
            if self._first_end is None:
                failures = self._collect(failures, replaceable)
            # Workers end, or cannot be reached, just before the end of their node is known.
            if end := self._node_end():
                raise NodeFailure(end)
            lost = self._lost(failures, replaceable)
            if lost is not None:
                raise WorkerLost(lost.worker.rank, as_exception(lost))
            failed = self._first_end or first_failed(failures)
            if failed.symptom.kind is Kind.LOST_PEER:
                failed = self._just_before() or failed
            if failed.symptom.kind is Kind.DIED:
                self._first_end = failed
            self._last = (time.monotonic(), failed)
        if self._is_closed:
            raise ClosedError("the runtime was closed")
        raise as_exception(failed) from None

    def _lost(self, failures: Sequence[Failed], replaceable: Sequence[Worker]) -> Failed | None:
        """Return the end of a worker that can be replaced, unless the run ends anyway."""
        names = {worker.name for worker in replaceable}
        ended = [failed for failed in failures if failed.symptom.kind is Kind.DIED]
        if self._first_end is not None or not ended:
            return None
        if any(failed.worker not in names for failed in ended):
            self._first_end = first_failed([f for f in ended if f.worker not in names])
            return None
        failed = first_failed(ended)
        return replace(failed, symptom=self._hanging.get(failed.worker, failed.symptom))

    def _just_before(self) -> Failed | None:
        """Return the failure that another thread has just raised, which may have lost the peer."""
        raised_s, failed = self._last
        return (
            failed if time.monotonic() - raised_s < 2 * _LOST_PEER_FACTOR * self._grace_s else None
        )

    def _collect(self, failures: list[Failed], replaceable: Sequence[Worker]) -> list[Failed]:
        """Return ``failures`` and those that follow within the grace period or until a death.

        The period is longer while all failures are those of workers that have lost a peer.
        """
        began_s = time.monotonic()
        watched = {worker.watch: worker for worker in [*self._workers, *replaceable]}
        excused = [worker for worker in self._replaceable if worker not in replaceable]
        calls = {c.reference: c for c in self._started_calls() if c.worker not in excused}
        pending = set(watched) | set(calls)
        while pending and not any(failed.symptom.kind is Kind.DIED for failed in failures):
            knows_cause = any(failed.symptom.kind < Kind.LOST_PEER for failed in failures)
            deadline = began_s + self._grace_s * (1 if knows_cause else _LOST_PEER_FACTOR)
            finished = self._finished(list(pending), max(0.0, deadline - time.monotonic()))
            if not finished:
                break
            pending.difference_update(finished)
            for reference in finished:
                symptom = self._symptom(reference)
                if reference in watched:
                    failures.append(self._died(watched[reference], symptom or _ENDED))
                elif symptom is not None:
                    failures.append(self._failed(calls[reference], symptom))
        return failures

    def _failed(self, call: Call, symptom: Symptom) -> Failed:
        if symptom.kind is Kind.DIED:
            return self._died(call.worker, symptom)
        return Failed(call.worker.name, call.method, symptom)

    def _died(self, worker: Worker, symptom: Symptom) -> Failed:
        """Return the end of a worker as a failure of the call that it was running."""
        own = {c.reference: c for c in self._started_calls() if c.worker is worker}
        cut_off: list[Call] = []
        ends_s = time.monotonic() + _SETTLE_S
        while own and not cut_off and (left_s := ends_s - time.monotonic()) > 0:
            for reference in self._finished(list(own), left_s):
                call, found = own.pop(reference), self._symptom(reference)
                cut_off += [call] if found is not None and found.kind is Kind.DIED else []
        busy = min(cut_off, key=lambda call: call.number, default=None)
        return Failed(worker.name, busy.method if busy else "", symptom)

    def _symptom(self, reference: Reference) -> Symptom | None:
        """Return the failure of a finished call, None if it succeeded."""
        try:
            self._result(reference)
        except ReportedError as error:
            return error.symptom
        return None

    def _started_calls(self) -> list[Call]:
        with self._noting:
            return list(self._calls)
