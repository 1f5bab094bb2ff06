# SPDX-License-Identifier: Apache-2.0
"""A stub of FlagCX's library: it connects the processes of one host, with either of the two binary
interfaces. What it takes from variables and what it leaves out stands in ``native/flagcx.c``.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from tandem.comm.flagcx_library import LIBRARY, Abi
from tandem.testing.compiling import NATIVE, Build, built

_NUMBERS = {Abi.HANDLER_GROUP: 12, Abi.DEVICE_HANDLE: 13}


def stub_library(abi: Abi, *, without: tuple[str, ...] = ()) -> Path:
    """The path of the built library, which does not export ``without``. It lies as FlagCX's own
    does, so that FLAGCX_PATH may be ``stub_library(abi).parents[1]``.

    Raises:
        UserError: it cannot be built here.
    """
    hidden = tuple(f"-D{name}=hidden_{name}" for name in without)
    return built(
        Build(
            file=f"lib/{LIBRARY}",
            sources=(NATIVE / "flagcx.c",),
            arguments=("-O2", "-Wall", "-x", "c", f"-DSTUB_ABI={_NUMBERS[abi]}", *hidden),
            libraries=("-lrt", "-lpthread", "-ldl"),
        )
    )


def counters(library: Path) -> tuple[int, int]:
    """How many streams this process has copied, and freed."""
    copied, freed = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(library)).stub_counters(ctypes.byref(copied), ctypes.byref(freed))
    return copied.value, freed.value
