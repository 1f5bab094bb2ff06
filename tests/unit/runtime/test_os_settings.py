# SPDX-License-Identifier: Apache-2.0
"""Freed memory is used again without asking the system for it, and a signal ends a process whose
handler was replaced. In processes of their own: threads that ended before leave heaps behind.
"""

import ctypes
import signal
import subprocess
import sys

import pytest

NUM_PAGES = 8 * 16 * 2**20 // 4096
PROGRAM = """
import ctypes, resource, threading
from tandem.runtime.os_settings import keep_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p

def touch_blocks():
    blocks = [ctypes.c_void_p(libc.malloc(16 * 2**20)) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, 16 * 2**20)
    for block in blocks:
        libc.free(block)

def print_page_faults():
    touch_blocks()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    touch_blocks()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)

keep_freed_memory()
print_page_faults()
thread = threading.Thread(target=print_page_faults)
thread.start()
thread.join()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="no glibc")
def test_no_page_is_fetched_again_in_any_thread() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    faults = [int(line) for line in done.stdout.split()]
    assert len(faults) == 2
    assert max(faults) < NUM_PAGES // 100


DYING = """
import os, signal, time
from tandem.runtime.os_settings import dying_at_once

signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))
with dying_at_once():
    pass
os.kill(os.getpid(), signal.SIGTERM)
with dying_at_once():
    signal.signal(signal.SIGTERM, lambda *_: print("replaced", flush=True))
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
"""


def test_a_signal_ends_a_process_although_its_handler_is_replaced() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DYING], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "handled\n")
