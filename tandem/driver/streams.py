# SPDX-License-Identifier: Apache-2.0
"""The standard streams of a process whose caller has closed some of them (``>&-``)."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open what the caller has closed, so that no file takes the number of a stream, here or in a
    child. A file that has the number already keeps it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            sink = os.open(os.devnull, os.O_RDWR)
            if sink != number and not _is_open(number):
                os.dup2(sink, number)
                os.close(sink)
                sink = number
            os.set_inheritable(sink, sink == number)
            setattr(sys, name, os.fdopen(sink, "r" if number == 0 else "w", closefd=False))


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
