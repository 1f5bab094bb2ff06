# SPDX-License-Identifier: Apache-2.0
"""A thread that makes calls which may never return, so that who asks for them can give up.

It ends with the process, whatever it is busy with. Not a pool: the calls are made in order.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any


class CallingThread:
    """Makes calls one after the other."""

    def __init__(self, name: str) -> None:
        """``name`` of the thread, which waits for calls from now on."""
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = SimpleQueue()
        # a daemon: where a call does not return, the process must be able to end
        Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """Its result comes when the calls before it have returned."""
        future: Future[Any] = Future()
        self._calls.put((call, future))
        return future

    def finish(self) -> None:
        """End after the calls so far."""
        self._calls.put(None)

    def drop(self) -> None:
        """Forget the calls that have not begun."""
        with suppress(Empty):
            while True:
                self._calls.get_nowait()

    def _run(self) -> None:
        while (item := self._calls.get()) is not None:
            call, future = item
            try:
                future.set_result(call())
            except Exception as error:  # whatever it was, who waits is to see it
                future.set_exception(error)
            del item, call, future  # or they would keep tensors until the next call
