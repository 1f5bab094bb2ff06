# SPDX-License-Identifier: Apache-2.0
"""Page-locked memory of the host: a device copies from and to it while the host goes on."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from tandem.platforms.record import CUDA

_CHUNK = 1 << 26
_MOST_THREADS = 16


def page_locked_zeros(num_bytes: int, *, device_type: str) -> Tensor:
    """Return zeros in page-locked memory, or in ordinary memory for a CPU.

    torch allocates page-locked memory at 2 GB/s on the host of an H200, and memory in huge pages
    that threads have filled is locked at 20 GB/s. Memory of the first kind is reused when it is
    freed, and the second is returned, so that it is meant for what lives as long as its owner.

    Args:
        device_type: torch's type of the devices that copy.

    Returns:
        A tensor of shape (num_bytes,) and of dtype uint8.
    """
    if device_type == "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    if device_type == CUDA.device_type and CUDA.is_available() and num_bytes:
        memory = _Registered(num_bytes)
        if memory.is_registered:
            return torch.frombuffer(memory, dtype=torch.uint8)
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


class _Registered(mmap.mmap):
    """Memory that a CUDA device knows as page-locked until it is freed. A forked child has none.

    Attributes:
        is_registered: False if the driver refused.
    """

    is_registered = False
    _address: int

    def __new__(cls, num_bytes: int) -> _Registered:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = super().__new__(cls, -1, num_bytes, flags=flags)
        memory.madvise(mmap.MADV_DONTFORK)
        with suppress(OSError):  # the kernel may have no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        memory._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        memory._fill()
        code = _runtime().cudaHostRegister(memory._address, num_bytes, 0)
        memory.is_registered = int(code) == 0
        if not memory.is_registered:
            _take_error()
        return memory

    def __del__(self) -> None:
        if self.is_registered and not sys.is_finalizing():
            torch.cuda.synchronize()
            _runtime().cudaHostUnregister(self._address)

    def _fill(self) -> None:
        """Write zeros, so that the memory has pages."""

        def fill(begin: int) -> None:
            ctypes.memset(self._address + begin, 0, min(_CHUNK, len(self) - begin))

        num_threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(num_threads) as pool:
            list(pool.map(fill, range(0, len(self), _CHUNK)))


def _runtime() -> Any:
    return torch.cuda.cudart()


def _take_error() -> None:
    """Take a refusal from the driver, which the next operation of the device would raise."""
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
