# SPDX-License-Identifier: Apache-2.0
"""The execution of an asynchronous program, with signals as an orderly stop.

The first SIGINT or SIGTERM makes the program save and stop at the next step boundary; a second one
ends it at once. Of several failures, only the first cause is raised.
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
    """A stop switch for signals. A program registers its stop function with ``on_stop``."""

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    def on_stop(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Call ``stop`` when a signal arrives; at once if one has already arrived."""
        self._stop = stop
        if self.signal_number is not None:
            self._start_stopping()

    def press(self, number: int) -> None:
        """Stop the program because of signal ``number``."""
        for other in _SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(other)
        self.signal_number = number
        name = signal.Signals(number).name
        logger.warning("%s: saving at the next step boundary; send it again to stop at once", name)
        if self._stop is not None:
            self._start_stopping()

    def _start_stopping(self) -> None:
        assert self._stop is not None, "on_stop() comes first"
        self._tasks.add(asyncio.ensure_future(self._stop()))


@dataclass(frozen=True, slots=True)
class Ended(Generic[R]):
    """The result of a program. ``exit_code`` is 128 plus the signal that stopped it, else 0."""

    result: R
    exit_code: int


def execute(program: Callable[[StopSwitch], Awaitable[R]]) -> Ended[R]:
    """Run ``program`` to its end. Of an exception group, the first cause is raised."""
    try:
        return asyncio.run(_with_signals(program))
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


def first_cause(error: BaseException) -> BaseException:
    """Return the first exception of nested groups."""
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
