# SPDX-License-Identifier: Apache-2.0
"""Freed memory is used again without asking the system for it."""

import ctypes
import resource
import threading

import pytest

from tandem.runtime.memory import keep_freed_memory

LIBC = ctypes.CDLL(None)
BLOCK_BYTES, NUM_BLOCKS = 16 * 2**20, 8


def touch_blocks() -> None:
    """Allocate and use more than is kept by default, then free it."""
    blocks = [ctypes.c_void_p(LIBC.malloc(BLOCK_BYTES)) for _ in range(NUM_BLOCKS)]
    for block in blocks:
        LIBC.memset(block, 1, BLOCK_BYTES)
    for block in blocks:
        LIBC.free(block)


def page_faults() -> int:
    """Pages of a second use of the blocks that had to be fetched."""
    touch_blocks()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch_blocks()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(not hasattr(LIBC, "mallopt"), reason="the C library is not glibc")
def test_no_page_is_fetched_again_in_any_thread() -> None:
    LIBC.malloc.restype = ctypes.c_void_p
    keep_freed_memory()
    num_pages = BLOCK_BYTES * NUM_BLOCKS // resource.getpagesize()
    faults = [page_faults()]
    thread = threading.Thread(target=lambda: faults.append(page_faults()))
    thread.start()
    thread.join()
    assert max(faults) < num_pages // 100
