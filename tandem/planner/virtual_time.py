# SPDX-License-Identifier: Apache-2.0
"""An asyncio loop under a virtual clock: whenever nothing is left to do, time jumps to the next
timer. Hours of a schedule pass in seconds, and the same program always does the same.

Only timers move time; a program that waits for a thread or a socket does not belong in it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

R = TypeVar("R")


class DeadlockError(RuntimeError):
    """Every task waits, and no timer is set that could wake one."""


class _Jumping(selectors.DefaultSelector):
    """Instead of waiting it moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Never blocks. Raises DeadlockError if nothing will ever happen."""
        if timeout is None:
            raise DeadlockError("all tasks wait and no timer is set: nothing will ever happen")
        self.now += max(timeout, 0.0)
        return []


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """``time`` is the virtual clock, from 0; ``asyncio.sleep`` and timeouts follow it."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(coroutine: Coroutine[Any, Any, R]) -> R:
    """The result of ``coroutine`` under a virtual clock of its own. Raises DeadlockError if it
    comes to a halt.
    """
    with asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(coroutine)
