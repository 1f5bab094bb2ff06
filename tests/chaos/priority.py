# SPDX-License-Identifier: Apache-2.0
"""The priority of the chaos job, whose bounds of time assume that runs get processor time."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

_PERIOD_S = 1.0


@contextmanager
def raised_priority(nice: int) -> Iterator[int]:
    """Give this process and what it starts a higher priority, and yield the niceness that it has.

    With autogroups, which many distributions of Linux turn on, sessions share the processors
    equally, and the niceness of a process counts within its own session only. The sessions of this
    process and of those below it, such as Ray's, are therefore raised too, where it is permitted.
    """
    try:
        os.nice(nice)
    except PermissionError:
        yield 0
        return
    over = threading.Event()
    thread = threading.Thread(target=_raise_sessions, args=(nice, over), daemon=True)
    thread.start()
    try:
        yield nice
    finally:
        over.set()
        thread.join()


def _raise_sessions(nice: int, over: threading.Event) -> None:
    own = psutil.Process()
    raise_session(own.pid, nice)
    while not over.wait(_PERIOD_S):
        for process in own.children(recursive=True):
            with suppress(ProcessLookupError):
                if os.getsid(process.pid) == process.pid:
                    raise_session(process.pid, nice)


def raise_session(pid: int, nice: int) -> None:
    """Set the niceness of the session of a process among all sessions, where Linux has that."""
    with suppress(OSError):
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")
