# SPDX-License-Identifier: Apache-2.0
"""The execution of an asynchronous program, with signals as an orderly stop.

The first SIGINT or SIGTERM makes the program save and stop at the next step boundary; a later one
ends it at once. Signals within a second of the first one belong to it: the kernel, a terminal and
a launcher may each send one for the same reason. Of several failures, only the first cause is
raised. If an event loop is running here, as in a notebook, the program runs on another thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from types import FrameType
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

R = TypeVar("R")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.5
SAME_REQUEST_S = 1.0
"""The time after a first signal in which others ask for the same stop."""


class StopSwitch:
    """A stop switch for signals and for the owner of one run, on any thread.

    A program registers its stop function with ``on_stop``.

    Attributes:
        signal_number: the signal that pressed the switch; None without one.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._is_pressed = False
        self._stop: Callable[[], Awaitable[None]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Future[None]] = set()

    @property
    def is_pressed(self) -> bool:
        """Whether a signal or the owner has asked for a stop."""
        return self._is_pressed

    def on_stop(self, stop: Callable[[], Awaitable[None]]) -> None:
        """Call ``stop`` when the switch is pressed; at once if it already was.

        The caller is a coroutine of the program.
        """
        self._loop, self._stop = asyncio.get_running_loop(), stop
        if self._is_pressed:
            self._start_stopping()

    def press(self) -> None:
        """Stop the program at the next step boundary."""
        self._is_pressed = True
        if self._loop is None or self._loop.is_closed():
            return
        if _running_loop() is self._loop:
            self._start_stopping()
        else:
            self._loop.call_soon_threadsafe(self._start_stopping)

    def press_for(self, number: int) -> None:
        """Stop the program because of signal ``number``."""
        self.signal_number = number
        name = signal.Signals(number).name
        logger.warning("%s: saving at the next step boundary; send it again to stop at once", name)
        self.press()

    def _start_stopping(self) -> None:
        assert self._stop is not None, "on_stop() comes first"
        if not self._tasks:
            self._tasks.add(asyncio.ensure_future(self._stop()))


@dataclass(frozen=True, slots=True)
class Ended(Generic[R]):
    """The result of a program. ``exit_code`` is 128 plus the signal that stopped it, else 0."""

    result: R
    exit_code: int


def execute(program: Callable[[], Awaitable[R]], *, switch: StopSwitch) -> Ended[R]:
    """Run ``program`` to its end. Of an exception group, the first cause is raised.

    Args:
        switch: the switch that signals press.

    Raises:
        KeyboardInterrupt: a second SIGINT.
    """
    try:
        return complete(lambda: _with_signals(program, switch), on_signal=switch.press_for)
    except BaseExceptionGroup as group:
        raise first_cause(group) from None


def complete(
    program: Callable[[], Awaitable[R]], *, on_signal: Callable[[int], None] | None = None
) -> R:
    """Await ``program`` in an event loop of its own and return its result.

    Args:
        on_signal: called with the first signal if this thread waits for another one.

    Raises:
        KeyboardInterrupt: a signal that ``on_signal`` does not get.
    """

    tasks: list[asyncio.Task[R]] = []

    async def run() -> R:
        tasks.append(asyncio.ensure_future(program()))
        return await tasks[0]

    if _running_loop() is None:
        with _handlers_kept():
            return asyncio.run(run())
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="run")
    with _handlers_kept():
        _handle_signals(on_signal)
        try:
            ended = thread.submit(copy_context().run, lambda: asyncio.run(run()))
            while not wait([ended], _LOOK_S).done:
                pass  # a signal that came just before the wait is handled between two
            return ended.result()
        except KeyboardInterrupt:
            for task in tasks:
                task.get_loop().call_soon_threadsafe(task.cancel)
            raise
        finally:
            thread.shutdown(wait=False)


def first_cause(error: BaseException) -> BaseException:
    """Return the first exception of nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _with_signals(program: Callable[[], Awaitable[R]], switch: StopSwitch) -> Ended[R]:
    loop = asyncio.get_running_loop()

    def press(number: int) -> None:
        for other in _SIGNALS:
            loop.remove_signal_handler(other)
            signal.signal(other, _end_at_once_from(time.monotonic() + SAME_REQUEST_S))
        switch.press_for(number)

    for number in _SIGNALS if _is_main_thread() else ():
        loop.add_signal_handler(number, press, number)
    result = await program()
    return Ended(result, 0 if switch.signal_number is None else 128 + switch.signal_number)


def _handle_signals(on_signal: Callable[[int], None] | None) -> None:
    """Let the first signal call ``on_signal``, and a later one end the program at once.

    The handlers of a running event loop do neither, because the loop is blocked.
    """

    def press(number: int, frame: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, _end_at_once_from(time.monotonic() + SAME_REQUEST_S))
        if on_signal is not None:
            on_signal(number)

    for number in _SIGNALS if _is_main_thread() else ():
        signal.signal(number, signal.default_int_handler if on_signal is None else press)


def _end_at_once_from(moment: float) -> Callable[[int, FrameType | None], None]:
    """Return a handler that ends the program at once if a signal comes after ``moment``.

    Args:
        moment: a time of ``time.monotonic()``, in seconds.
    """

    def end(number: int, frame: FrameType | None) -> None:
        if time.monotonic() < moment:
            return
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    return end


@contextmanager
def _handlers_kept() -> Iterator[None]:
    """Restore the signal handlers of the process, which an event loop replaces by the default."""
    if not _is_main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
