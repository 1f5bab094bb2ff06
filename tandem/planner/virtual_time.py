# SPDX-License-Identifier: Apache-2.0
"""An asyncio event loop with a virtual clock.

Whenever no task can run, the time jumps to the next timer. Hours of a schedule pass in seconds, and
every run of the same program is the same. Only timers advance the time, so a program that waits for
a thread or a socket must not run in this loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class DeadlockError(RuntimeError):
    """A deadlock: every task waits, and no timer is set that could wake one."""


class _Jumping(selectors.DefaultSelector):
    """A selector that moves the clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Move the clock by ``timeout``. Raise DeadlockError if there is none."""
        if timeout is None:
            raise DeadlockError("all tasks wait and no timer is set: nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """An event loop with a virtual clock from 0, which ``asyncio.sleep`` and timeouts follow."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(coroutine: Coroutine[Any, Any, R]) -> R:
    """Run ``coroutine`` under a new virtual clock and return its result.

    Raises:
        DeadlockError: all tasks wait for each other.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)
