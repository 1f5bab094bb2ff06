# SPDX-License-Identifier: Apache-2.0
"""One thing at a time that is done beside the thread that asks for it. What goes wrong is kept
until that thread asks: nothing is lost, and nobody is interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """Its owner starts, joins and checks. Each thing has a thread, which ends with it."""

    def __init__(self, name: str) -> None:
        """``name`` of the threads."""
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether something is being done."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, job: Callable[[], None], then: Callable[[], None]) -> None:
        """Do ``job``, and ``then`` however it ended. What was started before has ended."""
        assert not self.is_busy, "one thing at a time"

        def run() -> None:
            try:
                job()
            except BaseException as error:  # whoever asks next is told
                self._error = error
            finally:
                then()

        # Not waited for at the end of the process, which may come while a peer is silent.
        self._thread = threading.Thread(target=run, name=self._name, daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until it has ended."""
        if self._thread is not None:
            self._thread.join()

    def check(self) -> None:
        """Raise how it went wrong, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error
