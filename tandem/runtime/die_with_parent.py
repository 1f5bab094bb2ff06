# SPDX-License-Identifier: Apache-2.0
"""Ties the life of a process to that of the one that started it: a system call of Linux."""

from __future__ import annotations

import ctypes
import signal

_SET_DEATH_SIGNAL = 1  # prctl's number for it


def die_with_parent() -> None:
    """Let this process be killed when its parent ends, by whatever cause, also if it is stopped."""
    ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
