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
        niceness = os.nice(nice)
    except PermissionError:
        niceness = None
    if niceness is None:
        yield os.nice(0)
        return
    over = threading.Event()
    thread = threading.Thread(target=_raise_sessions, args=(nice, over), daemon=True)
    thread.start()
    try:
        yield niceness
    finally:
        over.set()
        thread.join()


def _raise_sessions(nice: int, over: threading.Event) -> None:
    own = psutil.Process()
    raised: set[psutil.Process] = set()
    while True:
        for process in {own, *own.children(recursive=True)} - raised:
            with suppress(ProcessLookupError):
                is_first = process == own or os.getsid(process.pid) == process.pid
                if is_first and raise_session(process.pid, nice):
                    raised.add(process)
        if over.wait(_PERIOD_S):
            return


def raise_session(pid: int, nice: int) -> bool:
    """Set the niceness of the session of a process among all sessions, where Linux has that.

    Returns:
        whether it is set. Without CAP_SYS_ADMIN, Linux permits it once in a tenth of a second.
    """
    try:
        Path(f"/proc/{pid}/autogroup").write_text(f"{nice}\n")
    except OSError:
        return False
    return True
