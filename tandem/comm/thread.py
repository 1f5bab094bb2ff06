# SPDX-License-Identifier: Apache-2.0
"""A thread for calls into libraries that may never return, so that the caller can stop waiting.

The thread is not a pool: it makes the calls in order. It never keeps the process from ending.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class CallingThread:
    """A daemon thread that makes calls one after the other."""

    def __init__(self, name: str) -> None:
        """Start the thread under this name."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon, because the process must be able to end while a call does not return.
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call behind the earlier ones, and return its future."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def finish(self) -> None:
        """End the thread after the calls that are queued now."""
        self._calls.put(None)

    def drop(self) -> None:
        """Discard the queued calls that have not begun."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except Exception as error:  # raised again in the thread that waits for the future
                future.set_exception(error)
            del item, call, future  # or their tensors would live until the next call
