# SPDX-License-Identifier: Apache-2.0
"""A watch of the steps of an engine that computes in this process.

A step that hangs cannot be ended from outside of its thread. The process therefore writes its
stacks, names the engine, and kills itself. The limit is 20 times the longest of the last 100 steps,
and at least a minute. The first step may compile kernels. A later step is named on stderr before
that: after 8 seconds, or twice the longest of those steps.
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
        held_s: the additional time after which a step is ended that keeps all threads from running.
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
        held_s: float = 5.0,
        slow_s: float = 8.0,
        end: Callable[[str], None] = end_process,
        warn: Callable[[str], None] = write_warning,
    ) -> None:
        self._engine = engine
        self._least_s, self._first_s = least_s, first_s
        self._look_s, self._held_s = look_s, held_s
        self._slow_s = slow_s
        self._end, self._warn = end, warn
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
        began_s, limit_s, _ = self._step = (time.monotonic(), self.limit_s, self.slow_s)
        # A step in native code may hold the interpreter's lock, and this needs no lock.
        faulthandler.dump_traceback_later(limit_s + self._held_s, exit=True, file=_STDERR)
        try:
            yield
        finally:
            self._step = None
            faulthandler.cancel_dump_traceback_later()
        self._durations_s.append(time.monotonic() - began_s)

    def close(self) -> None:
        """End the thread."""
        self._closing.set()

    def _run(self) -> None:
        named: object = None
        while not self._closing.wait(self._look_s):
            if (step := self._step) is None:
                continue
            began_s, limit_s, slow_s = step
            duration_s = time.monotonic() - began_s
            if duration_s > limit_s:
                self._end(f"{self._engine}: a step has not returned for {limit_s:.0f} s")
                return
            if duration_s > slow_s and step is not named:
                named = step
                self._warn(
                    f"{self._engine}: a step has not returned for {slow_s:.0f} s. After "
                    f"{limit_s:.0f} s, this process (pid {os.getpid()}) is ended"
                )
