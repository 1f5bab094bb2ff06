# SPDX-License-Identifier: Apache-2.0
"""What bounds the waits of something that several processes do together: time, and the first
failure that any of them, or the driver, reports under a key of the store.
"""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

POLL_S = 0.1
"""A process that waits looks for the failures of others this often."""


class GroupError(Exception):
    """A peer is gone, failed, or did not take part in time."""


class Deadline:
    """One for each common operation, in each process."""

    def __init__(self, timeout_s: float, *, store: Store, key: str) -> None:
        """Starts now. ``key`` is the same in all processes, and holds the first cause."""
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._store = store
        self._key = key
        self._next_look = time.monotonic() + POLL_S

    def check(self) -> None:
        """Return if waiting makes sense.

        Raises:
            GroupError: somebody failed, or the time is over.
        """
        now = time.monotonic()
        if now >= self._end:
            raise GroupError(f"not all took part within {self._timeout_s:g} s")
        if now < self._next_look:
            return
        self._next_look = now + POLL_S
        try:
            cause = self._store.get(self._key).decode() if self._store.check([self._key]) else ""
        except RuntimeError as error:
            raise GroupError(f"the driver's store is gone ({error})") from error
        if cause:
            raise GroupError(cause)


def report_failure(store: Store, key: str, *, cause: str) -> str:
    """Free whoever waits under a ``Deadline`` of this key. Returns the first cause of all."""
    try:
        return store.compare_set(key, "", cause).decode()
    except RuntimeError:  # the store went down with the driver: nobody is left to be told
        return cause
