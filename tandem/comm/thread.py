# SPDX-License-Identifier: Apache-2.0
"""A thread for calls that may never return, so that the caller can stop waiting."""

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
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # A daemon: the process can end while a call does not return.
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Queue a call behind the earlier ones, and return its future."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def finish(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def drop(self) -> None:
        """Discard the queued calls that have not started."""
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
            del item, call, future  # otherwise their tensors live until the next call
