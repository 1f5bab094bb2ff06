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

    torch allocates page-locked memory one small page after the other. For CUDA devices, several
    threads fill huge pages, and the driver locks them, which is faster (benchmarks/DIARY.md). This
    memory is returned to the system when the last tensor in it is freed, where torch keeps its own
    for later allocations. It is meant for tensors that live as long as their owner.

    Args:
        device_type: torch's type of the devices that copy.

    Returns:
        A tensor of shape (num_bytes,) and of dtype uint8.
    """
    if device_type == "cpu":
        return torch.zeros(num_bytes, dtype=torch.uint8)
    if device_type == CUDA.device_type and CUDA.is_available() and num_bytes:
        zeros = _registered_zeros(num_bytes)
        if zeros is not None:
            return zeros
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True)


def _registered_zeros(num_bytes: int) -> Tensor | None:
    """Return zeros in memory that the driver locks; None if there is none or it refuses."""
    try:
        memory = _Registered(num_bytes)
    except OSError:  # torch reports memory that is missing
        return None
    return torch.frombuffer(memory, dtype=torch.uint8) if memory.is_registered else None


class _Registered(mmap.mmap):
    """Memory that the driver of CUDA devices locks until it is freed. Forked children have none.

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
