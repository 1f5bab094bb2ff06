# SPDX-License-Identifier: Apache-2.0
"""How this process gets memory from the system: glibc's settings, nothing of torch's."""

from __future__ import annotations

import ctypes

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt's names of its parameters
_LARGEST_REUSED_BYTES = 32 * 2**20  # more is not accepted
_MOST_KEPT_BYTES = 2**31 - 1


def keep_freed_memory() -> None:
    """Keep freed memory for the next allocation instead of handing it back, for the whole process.

    Activations are freed and allocated anew with every micro-batch; fetching their pages from the
    system each time is a tenth of the update of a small model. Threads share one heap, because
    those that threads other than the first get are handed back in pieces of 64 MiB. To be called
    before there are threads. Without glibc nothing changes.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_THRESHOLD, _LARGEST_REUSED_BYTES)
        set_option(_TRIM_THRESHOLD, _MOST_KEPT_BYTES)
