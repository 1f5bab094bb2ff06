# SPDX-License-Identifier: Apache-2.0
"""A readers-writer lock over the weights of a process, with the version that they hold.

The lock works between threads of one process. Readers share the weights. A writer waits until they
have left and excludes them; later readers wait for the writer. A reader that queues work
on a device must leave only after the device has finished it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.weight_sync.failure import SyncError


class WeightGate:
    """The version of some weights, and the lock that guards them."""

    def __init__(self, version: int | None = None) -> None:
        """Guard weights that hold ``version``; None forbids their use."""
        self._condition = threading.Condition()
        self._version = version
        self._reason = "" if version is not None else "no version has arrived yet"
        self._readers = 0
        self._is_writing = False

    @property
    def version(self) -> int | None:
        """The version of the weights, or None while they must not be used."""
        return self._version

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[int]:
        """Keep the weights unchanged until the block ends. Yield their version.

        Raises:
            SyncError: the weights cannot be used, or are being written for over ``timeout_s``.
        """
        with self._condition:
            if not self._condition.wait_for(lambda: not self._is_writing, timeout_s):
                raise SyncError(f"weights are being replaced for longer than {timeout_s:g} s")
            if self._version is None:
                raise SyncError(f"weights cannot be used: {self._reason}")
            self._readers += 1
            version = self._version
        try:
            yield version
        finally:
            with self._condition:
                self._readers -= 1
                self._condition.notify_all()

    @contextmanager
    def writing(self, timeout_s: float) -> Iterator[None]:
        """Exclude all readers until the block ends.

        Raises:
            SyncError: the weights are in use for longer than ``timeout_s``.
        """
        end = time.monotonic() + timeout_s
        with self._condition:
            if not self._condition.wait_for(lambda: not self._is_writing, timeout_s):
                raise SyncError(f"weights are being replaced for longer than {timeout_s:g} s")
            self._is_writing = True
        try:
            with self._condition:
                left = max(0.0, end - time.monotonic())
                if not self._condition.wait_for(lambda: not self._readers, left):
                    raise SyncError(f"weights are in use for longer than {timeout_s:g} s")
            yield
        finally:
            with self._condition:
                self._is_writing = False
                self._condition.notify_all()

    def publish(self, version: int) -> None:
        """Declare that all weights now hold ``version``. Only a writer may call this."""
        self._version, self._reason = version, ""

    def forbid(self, reason: str) -> None:
        """Declare that the weights hold no version, because of ``reason``. For a writer only."""
        self._version, self._reason = None, reason
