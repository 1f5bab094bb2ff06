# SPDX-License-Identifier: Apache-2.0
"""Keeps those who use weights apart from the one who replaces them, and says which version it is.

Threads of one process only. Readers share; a writer waits for them and excludes them, and those who
come after it wait for it. Who reads on a device leaves only when the device is done.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.weight_sync.failure import SyncError


class WeightGate:
    """The version of some weights, and who may touch them."""

    def __init__(self, version: int | None = None) -> None:
        """``version`` of the weights as they are now, None while they are not to be used."""
        self._condition = threading.Condition()
        self._version = version
        self._reason = "" if version is not None else "no version has arrived yet"
        self._readers = 0
        self._is_writing = False

    @property
    def version(self) -> int | None:
        """Of the weights, None if they cannot be used."""
        return self._version

    @contextmanager
    def reading(self, timeout_s: float) -> Iterator[int]:
        """Use the weights, which stay as they are until the block ends. Yields their version.

        Raises:
            SyncError: they are unusable, or are being written for longer than ``timeout_s``.
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
        """Replace the weights while nobody uses them.

        Raises:
            SyncError: they are in use for longer than ``timeout_s``.
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
        """The weights are now ``version``, wholly. For a writer."""
        self._version, self._reason = version, ""

    def forbid(self, reason: str) -> None:
        """The weights are of no version from now on. For a writer."""
        self._version, self._reason = None, reason
