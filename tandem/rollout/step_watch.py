# SPDX-License-Identifier: Apache-2.0
"""A watch of the steps of an engine that computes in this process.

A step that hangs cannot be ended from outside of its thread. The process therefore writes its
stacks, names the engine, and kills itself. The limit is 20 times the longest of the last 100 steps,
and at least a minute. The first step may compile kernels. A later step is named on stderr before
that: after 8 seconds, or twice the longest of those steps. Time in which the process is suspended
does not count.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_STDERR = 2
_NUM_STEPS = 100
_FACTOR = 20.0
_SLOW_FACTOR = 2.0
_AWAY_S = 5.0
"""A look that is late by more than this shows that the process was suspended."""


def end_process(cause: str) -> None:
    """Write the stacks of all threads and the cause to stderr, and kill this process."""
    faulthandler.dump_traceback(file=_STDERR)
    os.write(_STDERR, f"error: {cause}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def write_warning(text: str) -> None:
    """Write a warning to stderr. A logger may need a lock that the step holds."""
    os.write(_STDERR, f"warning: {text}\n".encode())


class StepWatch:
    """A thread that ends the process when a step does not return in time.

    Args:
        engine: the name of the engine, for the message.
        least_s: the least limit of a step.
        first_s: the limit of the first step.
        look_s: the period in which the thread looks.
        held_s: the time, beyond the limit, after which a step is ended that keeps all threads from
            running. This clock goes on while the process is suspended, for whose sake it is long.
        slow_s: the least time after which a step that is not the first is named.
        end: ends the process.
        warn: names a step that is still waited for.
    """

    def __init__(
        self,
        engine: str,
        *,
        least_s: float = 60.0,
        first_s: float = 900.0,
        look_s: float = 1.0,
        held_s: float = 600.0,
        slow_s: float = 8.0,
        end: Callable[[str], None] = end_process,
        warn: Callable[[str], None] = write_warning,
    ) -> None:
        self._engine = engine
        self._least_s, self._first_s = least_s, first_s
        self._look_s, self._held_s = look_s, held_s
        self._slow_s = slow_s
        self._end, self._warn = end, warn
        self._clock: Callable[[], float] = time.monotonic
        self._away_s = 0.0
        self._arming = threading.Lock()
        self._durations_s: deque[float] = deque(maxlen=_NUM_STEPS)
        self._step: tuple[float, float, float] | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def limit_s(self) -> float:
        """The limit of the next step."""
        if not self._durations_s:
            return self._first_s
        return max(self._least_s, _FACTOR * max(self._durations_s))

    @property
    def slow_s(self) -> float:
        """The time after which the next step is named; that of the first step is its limit."""
        if not self._durations_s:
            return self._first_s
        return max(self._slow_s, _SLOW_FACTOR * max(self._durations_s))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the block, which is one step."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="step watch", daemon=True)
            self._thread.start()
        began_s, limit_s, _ = self._step = (self._awake_s(), self.limit_s, self.slow_s)
        self._arm(limit_s)
        try:
            yield
        finally:
            with self._arming:
                self._step = None
                faulthandler.cancel_dump_traceback_later()
        self._durations_s.append(self._awake_s() - began_s)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def _awake_s(self) -> float:
        """Return the time, without that in which the process is known to have been suspended."""
        return self._clock() - self._away_s

    def _arm(self, limit_s: float) -> None:
        """Let the interpreter end a step in native code that holds its lock. This needs no lock."""
        faulthandler.dump_traceback_later(limit_s + self._held_s, exit=True, file=_STDERR)

    def _notice_suspension(self, looked_s: float, now_s: float, *, limit_s: float) -> None:
        """Leave out the time since the last look if it shows that the process was suspended."""
        late_s = now_s - looked_s - self._look_s
        if late_s <= _AWAY_S:
            return
        self._away_s += late_s
        with self._arming:
            if self._step is not None:
                self._arm(limit_s)

    def _run(self) -> None:
        named: object = None
        looked_s = self._clock()
        while not self._closing.wait(self._look_s):
            now_s = self._clock()  # once: a suspension between two readings would be a step's time
            self._notice_suspension(looked_s, now_s, limit_s=self.limit_s)
            looked_s = now_s
            if (step := self._step) is None:
                continue
            began_s, limit_s, slow_s = step
            duration_s = now_s - self._away_s - began_s
            if duration_s > limit_s:
                self._end(f"{self._engine}: a step has not returned for {limit_s:.0f} s")
                return
            if duration_s > slow_s and step is not named:
                named = step
                self._warn(
                    f"{self._engine}: a step has not returned for {slow_s:.0f} s. After "
                    f"{limit_s:.0f} s, this process (pid {os.getpid()}) is ended"
                )
