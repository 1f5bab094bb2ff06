# SPDX-License-Identifier: Apache-2.0
"""Deadlines of collective operations.

A wait ends at its deadline, or when any process reports a failure under the key of the operation in
the driver's store.
"""

from __future__ import annotations

import time

from torch._C._distributed_c10d import Store

POLL_S = 0.1
"""The interval at which a waiting process checks for failures of other processes."""


class GroupError(Exception):
    """The failure of a collective: a peer is gone, has failed, or did not take part in time."""


class Deadline:
    """The deadline of one collective operation in one process."""

    def __init__(self, timeout_s: float, *, store: Store, key: str) -> None:
        """Start the clock.

        Args:
            key: the key in ``store`` for the first failure, the same in all processes.
        """
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s
        self._store = store
        self._key = key
        self._next_look = time.monotonic() + POLL_S

    def check(self) -> None:
        """Raise GroupError if the time is over or a process has reported a failure."""
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
    """End the waits of all processes under a ``Deadline`` of this key.

    Returns:
        the cause that was reported first, possibly by another process.
    """
    try:
        return store.compare_set(key, "", cause).decode()
    except RuntimeError:  # the store ended with the driver, and so do the other processes
        return cause
