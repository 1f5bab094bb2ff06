# SPDX-License-Identifier: Apache-2.0
"""Detection of workers that hang: their process is stopped, or stuck in a call.

The driver requests a heartbeat from each worker every few seconds, and the worker answers on a
separate thread, even during a call. Time is counted in rounds of the driver: a driver that was
suspended does not blame its workers. ``waiting`` detects the end of a process.
"""

from __future__ import annotations

import math
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tandem.runtime.failure import Kind, ReportedError, Symptom
from tandem.runtime.waiting import Reference, Waits, Worker

_LONGEST_PERIOD_S = 5.0
_ROUNDS = 8
"""The minimum number of unanswered requests before a worker counts as stopped."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A worker's answer.

    Attributes:
        cpu_s: the processor time of the thread that runs the current call; None without a call.
        stack: the stack of that thread.
    """

    cpu_s: float | None = None
    stack: str = ""


class CallMonitor:
    """The current call of a worker, as the worker's other threads see it."""

    def __init__(self) -> None:
        self._thread: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """Mark this thread as the one that runs a call."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def heartbeat(self) -> Heartbeat:
        """Return the processor time and the stack of the current call."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread)
        if thread is None or frame is None:
            return Heartbeat()
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
        return Heartbeat(cpu_s, "".join(traceback.format_stack(frame)).rstrip())


@dataclass(frozen=True, slots=True)
class Limits:
    """The times after which a worker counts as hanging.

    Attributes:
        timeout_s: ``nccl_timeout``, after which collectives give up.
    """

    timeout_s: float

    @property
    def silence_s(self) -> float:
        """The limit without a heartbeat: half of the timeout.

        It expires before workers that wait in a collective time out and are blamed instead.
        """
        return self.timeout_s / 2

    @property
    def stillness_s(self) -> float:
        """The limit for a call that uses no processor time: a tenth above the timeout.

        Until the timeout, a worker may well wait in a collective.
        """
        return 1.1 * self.timeout_s

    @property
    def period_s(self) -> float:
        """The time between two requests for a heartbeat."""
        return min(_LONGEST_PERIOD_S, self.silence_s / _ROUNDS)


@dataclass(slots=True)
class _Watched:
    worker: Worker
    request: Callable[[], Reference]
    reference: Reference
    last: Heartbeat = Heartbeat()
    silent_rounds: int = 0
    still_rounds: int = 0


class Liveness:
    """A thread of the driver that watches all workers, from ``start`` to ``close``.

    Args:
        finished, result: see ``Waits``.
    """

    def __init__(
        self,
        waits: Waits,
        *,
        finished: Callable[[Sequence[Reference], float], Sequence[Reference]],
        result: Callable[[Reference], Heartbeat],
        limits: Limits,
    ) -> None:
        self._waits = waits
        self._finished = finished
        self._result = result
        self._limits = limits
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._watched: dict[Worker, _Watched] = {}

    def start(self, requests: Mapping[Worker, Callable[[], Reference]]) -> None:
        """Watch the workers. From now on, one that hangs ends every wait.

        Args:
            requests: for each worker, the function that requests its ``Heartbeat``.
        """
        for worker, request in requests.items():
            self.watch(worker, request)
        self._thread = threading.Thread(target=self._run, name="liveness")
        self._thread.start()

    def watch(self, worker: Worker, request: Callable[[], Reference]) -> None:
        """Watch one more worker."""
        self._watched[worker] = _Watched(worker, request, request())

    def forget(self, worker: Worker) -> None:
        """Watch a worker no longer. Do nothing if it is not watched."""
        self._watched.pop(worker, None)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.wait(self._limits.period_s):
            watched = list(self._watched.values())
            answered = set(self._finished([one.reference for one in watched], 0))
            for one in watched:
                symptom = self._count_round(one, has_answered=one.reference in answered)
                if symptom is not None and self._ends_run(one.worker, symptom):
                    return

    def _ends_run(self, worker: Worker, symptom: Symptom) -> bool:
        """Report a worker that hangs. Return whether the run ends, and no other worker matters."""
        self.forget(worker)
        return self._waits.hangs(worker, symptom)

    def _count_round(self, one: _Watched, *, has_answered: bool) -> Symptom | None:
        """Count this round for a worker. Return a symptom if it exceeds a limit."""
        limits = self._limits
        if not has_answered:
            one.silent_rounds += 1
            if one.silent_rounds < math.ceil(limits.silence_s / limits.period_s):
                return None
            duration = f"{limits.silence_s:g} s (half of nccl_timeout)"
            return _hangs(f"no sign of life for {duration}: it is stopped, or starved")
        one.silent_rounds = 0
        with suppress(ReportedError):  # ``waiting`` detects the end of a process
            heartbeat = self._result(one.reference)
            is_still = heartbeat.cpu_s is not None and heartbeat.cpu_s == one.last.cpu_s
            one.still_rounds = one.still_rounds + 1 if is_still else 0
            one.last, one.reference = heartbeat, one.request()
        if one.still_rounds < math.ceil(limits.stillness_s / limits.period_s):
            return None
        duration = f"{limits.stillness_s:g} s (nccl_timeout and a tenth)"
        return _hangs(f"it has not computed for {duration}", stack=one.last.stack)


def _hangs(cause: str, *, stack: str = "") -> Symptom:
    return Symptom(Kind.HANGS, cause, stack, time.time())
