# SPDX-License-Identifier: Apache-2.0
"""Processes of a benchmark end with it, whatever ends it. Needs psutil only, so that ``peers/`` use
it too.
"""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_END_S = 5.0


@contextmanager
def children_end() -> Iterator[None]:
    """End all processes that this one or its children have started when the block ends.

    SIGTERM and SIGHUP end the block like Ctrl-C does. Processes whose parents have ended become
    children of this process, so that they are found. Also a decorator of ``main``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in _SIGNALS:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        _end(psutil.Process().children(recursive=True), signal.SIGTERM)
        while left := psutil.Process().children(recursive=True):
            _end(left, signal.SIGKILL)


def start(command: Sequence[str], **options: Any) -> "subprocess.Popen[str]":
    """Start a process that the system kills when this one ends, even if that is by SIGKILL."""
    return subprocess.Popen(command, text=True, preexec_fn=_die_with_parent, **options)  # noqa: PLW1509


def _end(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=_END_S)


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _exit(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
