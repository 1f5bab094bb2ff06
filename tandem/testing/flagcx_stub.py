# SPDX-License-Identifier: Apache-2.0
"""A stub of FlagCX's library, with either binary interface, for the processes of one host.

``native/flagcx.c`` lists the environment variables that it reads and the functions that it lacks.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from tandem.comm.flagcx_library import LIBRARY, Abi
from tandem.testing.compiling import NATIVE, Build, built

_NUMBERS = {Abi.HANDLER_GROUP: 12, Abi.DEVICE_HANDLE: 13}


def stub_library(abi: Abi, *, without: tuple[str, ...] = ()) -> Path:
    """Return the path of the built library, which does not export the functions ``without``.

    The folder layout is FlagCX's: FLAGCX_PATH may be ``stub_library(abi).parents[1]``.

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
    """Return the numbers of streams that this process has copied and freed."""
    copied, freed = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(library)).stub_counters(ctypes.byref(copied), ctypes.byref(freed))
    return copied.value, freed.value
