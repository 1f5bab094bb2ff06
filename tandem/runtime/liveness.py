# SPDX-License-Identifier: Apache-2.0
"""Notices workers whose processes are there and do nothing: stopped, or stuck in a call.

Each is asked for a sign of life every few seconds, which it gives on a thread of its own while its
call goes on. Time is counted in rounds that the driver itself has lived through, so that one that
was stopped for a while does not blame its workers. The end of a process is not noticed here: see
``waiting``.
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
"""At least so many questions before a worker counts as stopped."""


@dataclass(frozen=True, slots=True)
class Sign:
    """A worker's answer.

    Attributes:
        cpu_s: processor time of the thread that runs the call under way; None without a call.
        stack: where that thread is.
    """

    cpu_s: float | None = None
    stack: str = ""


class CallClock:
    """In a worker: what the call under way does, as other threads see it."""

    def __init__(self) -> None:
        self._thread: int | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        """While this thread runs a call."""
        self._thread = threading.get_ident()
        try:
            yield
        finally:
            self._thread = None

    def sign(self) -> Sign:
        """Of life."""
        thread = self._thread
        frame = None if thread is None else sys._current_frames().get(thread)
        if thread is None or frame is None:
            return Sign()
        cpu_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
        return Sign(cpu_s, "".join(traceback.format_stack(frame)).rstrip())


@dataclass(frozen=True, slots=True)
class Limits:
    """How long is too long.

    Args:
        timeout_s: ``nccl_timeout``, after which collectives give up.
    """

    timeout_s: float

    @property
    def silence_s(self) -> float:
        """Without a sign: half of the timeout, before those who wait for the worker in a collective
        give up and are blamed instead."""
        return self.timeout_s / 2

    @property
    def stillness_s(self) -> float:
        """Within a call, without any processor time: a tenth above the timeout, as one that waits
        in a collective does so rightly until then."""
        return 1.1 * self.timeout_s

    @property
    def period_s(self) -> float:
        """Between questions."""
        return min(_LONGEST_PERIOD_S, self.silence_s / _ROUNDS)


@dataclass(slots=True)
class _Watched:
    worker: Worker
    ask: Callable[[], Reference]
    reference: Reference
    last: Sign = Sign()
    silent_rounds: int = 0
    still_rounds: int = 0


class Liveness:
    """A thread of the driver that asks, from ``start`` to ``close``.

    Args:
        finished, result: as those of ``Waits``.
    """

    def __init__(
        self,
        waits: Waits,
        *,
        finished: Callable[[Sequence[Reference], float], Sequence[Reference]],
        result: Callable[[Reference], Sign],
        limits: Limits,
    ) -> None:
        self._waits = waits
        self._finished = finished
        self._result = result
        self._limits = limits
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, asks: Mapping[Worker, Callable[[], Reference]]) -> None:
        """From now on a worker that hangs ends every wait. ``asks`` says how to ask each for its
        ``Sign``."""
        watched = [_Watched(worker, ask, ask()) for worker, ask in asks.items()]
        self._thread = threading.Thread(target=self._run, args=(watched,), name="liveness")
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, watched: list[_Watched]) -> None:
        while not self._closing.wait(self._limits.period_s):
            answered = set(self._finished([one.reference for one in watched], 0))
            for one in watched:
                symptom = self._look(one, has_answered=one.reference in answered)
                if symptom is not None:
                    self._waits.hangs(one.worker, symptom)
                    return

    def _look(self, one: _Watched, *, has_answered: bool) -> Symptom | None:
        """Count this round for a worker; a symptom if it was one too many."""
        limits = self._limits
        if not has_answered:
            one.silent_rounds += 1
            if one.silent_rounds < math.ceil(limits.silence_s / limits.period_s):
                return None
            duration = f"{limits.silence_s:g} s (half of nccl_timeout)"
            return _hangs(f"no sign of life for {duration}: it is stopped, or starved")
        one.silent_rounds = 0
        with suppress(ReportedError):  # the end of a process has its own way to be told
            sign = self._result(one.reference)
            is_still = sign.cpu_s is not None and sign.cpu_s == one.last.cpu_s
            one.still_rounds = one.still_rounds + 1 if is_still else 0
            one.last, one.reference = sign, one.ask()
        if one.still_rounds < math.ceil(limits.stillness_s / limits.period_s):
            return None
        duration = f"{limits.stillness_s:g} s (nccl_timeout and a tenth)"
        return _hangs(f"it has not computed for {duration}", stack=one.last.stack)


def _hangs(cause: str, *, stack: str = "") -> Symptom:
    return Symptom(Kind.HANGS, cause, stack, time.time())
