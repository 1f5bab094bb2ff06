# SPDX-License-Identifier: Apache-2.0
"""Settings of this process: its garbage collector, its heap in glibc, its death with the parent,
its handlers of signals.
"""

from __future__ import annotations

import ctypes
import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_PR_SET_PDEATHSIG = 1
_SIGNAL_ACTION_BYTES = 1024  # of struct sigaction, which is smaller
_REPEAT_S = 0.001
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt
_MAX_MMAP_THRESHOLD_BYTES = 32 * 2**20  # glibc accepts no more
_MAX_TRIM_THRESHOLD_BYTES = 2**31 - 1


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its starting thread ends.

    SIGKILL ends even a stopped process.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(number))


def die_at_once(number: int = signal.SIGTERM) -> None:
    """Let a signal end this process as it does by default, whatever its threads are doing.

    Ray handles SIGTERM in Python. Python calls a handler only when the main thread runs its code:
    not while that thread is in a native call, nor while another one keeps Python's lock.
    """
    ctypes.CDLL(None).signal(int(number), None)


@contextmanager
def dying_at_once(number: int = signal.SIGTERM) -> Iterator[None]:
    """Let a signal end this process as it does by default while the block runs, whatever handlers
    native code installs meanwhile. The handler from before the block is back behind it.

    Ray's library installs one while it connects. It prints the stack of the process, and whatever
    ends a half made connection crashes the process.
    """
    libc, saved = ctypes.CDLL(None), ctypes.create_string_buffer(_SIGNAL_ACTION_BYTES)
    libc.sigaction(int(number), None, saved)
    die_at_once(number)
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(_REPEAT_S):
            die_at_once(number)

    thread = threading.Thread(target=repeat, name="dying-at-once")
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        libc.sigaction(int(number), saved, None)


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation, instead of returning it to the system.

    The setting holds for the whole process and must be made before there are threads. Activations
    are freed and allocated again in every micro-batch; fetching their pages from the system each
    time takes a tenth of the update of a small model. Threads share one heap, because the heaps of
    all threads but the first are returned in pieces of 64 MiB. It does nothing without glibc.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_THRESHOLD, _MAX_MMAP_THRESHOLD_BYTES)
        set_option(_TRIM_THRESHOLD, _MAX_TRIM_THRESHOLD_BYTES)


@contextmanager
def no_collection() -> Iterator[None]:
    """Turn the garbage collector off for imports: they make a million objects and no garbage."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
