# SPDX-License-Identifier: Apache-2.0
"""A function in a forked child process, while this process waits for its end.

The child gets SIGINT and SIGTERM that this process receives, and is killed if this process ends.
All processes that the child leaves behind become children of this process, which can end them. The
caller must have a single thread, because a fork copies no other.
"""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import psutil

from tandem.runtime.os_settings import die_with_parent

Send = Callable[[str], None]

_PR_SET_CHILD_SUBREAPER = 36
_FORWARDED = (signal.SIGINT, signal.SIGTERM)
_WATCHED = (*_FORWARDED, signal.SIGCHLD)
_KERNEL = 0x80  # si_code of a signal from a terminal, which every process of the group gets
_MAX_MESSAGE_BYTES = 32_000  # fits into a pipe that nobody reads yet
_END_S = 30.0


@dataclass(frozen=True, slots=True)
class ChildEnd:
    """The end of a child.

    Attributes:
        code: its exit code, or 128 plus the number of the signal that ended it.
        killed_by: that signal; None if the child exited.
        message: the text that it sent; "" without one.
        stopped_by: SIGINT or SIGTERM, if this process got one; else None.
    """

    code: int
    killed_by: signal.Signals | None
    message: str
    stopped_by: signal.Signals | None


def run_in_child(body: Callable[[Send], int]) -> ChildEnd:
    """Call ``body`` in a child process, wait for its end, and kill what it leaves behind.

    Args:
        body: a function of ``send``, which takes one text for this process. It returns the exit
            code of the child, whose stack ends with SystemExit.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    reading, writing = os.pipe()
    parent = os.getpid()
    with _blocked() as mask:
        child = os.fork()
        if child == 0:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            die_with_parent()
            if os.getppid() != parent:
                os._exit(1)
            os.close(reading)
            raise SystemExit(body(lambda text: _send(writing, text)))
        os.close(writing)
        status, stopped_by = _wait(child)
        _kill_descendants()
        late = signal.sigtimedwait(_FORWARDED, 0)  # no child is left to get it
    with open(reading, "rb") as stream:
        message = stream.read().decode(errors="replace")
    if late is not None:
        stopped_by = signal.Signals(late.si_signo)
    if os.WIFSIGNALED(status):
        killed_by = signal.Signals(os.WTERMSIG(status))
        return ChildEnd(128 + killed_by, killed_by, message, stopped_by)
    return ChildEnd(os.WEXITSTATUS(status), None, message, stopped_by)


@contextmanager
def _blocked() -> Iterator[set[signal.Signals]]:
    """Keep the watched signals pending for ``_wait``; yield the earlier mask."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    earlier = {signal.Signals(number) for number in mask}
    try:
        yield earlier
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, earlier)


def _send(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode(errors="replace")[:_MAX_MESSAGE_BYTES])


def _wait(child: int) -> tuple[int, signal.Signals | None]:
    """Forward signals until the child ends; return its status and the last forwarded signal."""
    stopped_by = None
    while True:
        found = signal.sigwaitinfo(_WATCHED)
        if found.si_signo in _FORWARDED:
            stopped_by = signal.Signals(found.si_signo)
            if found.si_code != _KERNEL:
                os.kill(child, stopped_by)
        for pid, status in _reaped():
            if pid == child:
                return status, stopped_by


def _reaped() -> Iterator[tuple[int, int]]:
    """Yield process and status of each child that has ended, also of those left by the child."""
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def _kill_descendants() -> None:
    left = psutil.Process().children(recursive=True)
    for process in left:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=_END_S)
