# SPDX-License-Identifier: Apache-2.0
"""Runs an asynchronous program to its end, turning signals into an orderly stop.

The first SIGINT or SIGTERM asks the program to save and leave at the next step boundary; a second
one ends it at once. Of several failures the first cause is raised, alone.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSwitch:
    """What signals press. A program says with ``on_stop`` what stopping means while it can be
    stopped.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    def on_stop(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Call ``stop`` when a signal comes, at once if one has come already."""
        self._stop = stop
        if self.signal_number is not None:
            self._start_stopping()

    def press(self, number: int) -> None:
        """A signal has come."""
        for other in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(other)
        self.signal_number = number
        name = signal.Signals(number).name
        logger.warning("%s: saving at the next step boundary; once more to leave at once", name)
        if self._stop is not None:
            self._start_stopping()

    def _start_stopping(self) -> None:
        assert self._stop is not None, "nothing to stop"
        self._tasks.add(asyncio.ensure_future(self._stop()))


@dataclass(frozen=True, slots=True)
class Ended(Generic[R]):
    """How a program ended. ``exit_code`` is 128 plus the signal that stopped it, 0 without one."""

    result: R
    exit_code: int


def execute(program: Callable[[StopSwitch], Awaitable[R]]) -> Ended[R]:
    """Run ``program`` to its end. Raises what it raises; of an exception group the first cause."""
    try:
        return asyncio.run(_with_signals(program))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


def first_cause(error: BaseException) -> BaseException:
    """The first exception of a nest of groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _with_signals(program: Callable[[StopSwitch], Awaitable[R]]) -> Ended[R]:
    switch = StopSwitch()
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, switch.press, number)
    result = await program(switch)
    return Ended(result, 0 if switch.signal_number is None else 128 + switch.signal_number)
