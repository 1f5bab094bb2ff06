# SPDX-License-Identifier: Apache-2.0
"""Builds the stub of FlagCX with the C compiler, once for each set of options, and asks it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from functools import cache
from hashlib import sha256
from pathlib import Path

from tandem.comm.flagcx_library import LIBRARY, Abi

SOURCE = Path(__file__).with_name("stub.c")
_NUMBERS = {Abi.HANDLER_GROUP: 12, Abi.DEVICE_HANDLE: 13}


@cache
def stub_library(abi: Abi, *, without: tuple[str, ...] = ()) -> Path:
    """The path of a built library, which does not export ``without``. It can be loaded by any
    process of this host, and is built again when its source changes."""
    options = [f"-DSTUB_ABI={_NUMBERS[abi]}", *without]
    text = SOURCE.read_bytes() + repr(options).encode()
    name = f"tandem-flagcx-{os.getuid()}-{sha256(text).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name / "lib"
    library = folder / LIBRARY
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        _compile(library, options[0], without=without)
    return library


def counters(library: Path) -> tuple[int, int]:
    """How many streams this process has copied, and freed."""
    copied, freed = ctypes.c_int(), ctypes.c_int()
    ctypes.CDLL(str(library)).stub_counters(ctypes.byref(copied), ctypes.byref(freed))
    return copied.value, freed.value


def _compile(library: Path, option: str, *, without: tuple[str, ...]) -> None:
    """Whole or not at all: several processes may do it at a time."""
    script = library.with_name(f"exports-{os.getpid()}")
    partial = library.with_name(f"{LIBRARY}-{os.getpid()}")
    hidden = "".join(f"{name};" for name in without)
    script.write_text(f"{{ global: *; {f'local: {hidden}' if hidden else ''} }};")
    command = ["cc", "-O2", "-Wall", "-shared", "-fPIC", option, "-o", str(partial), str(SOURCE)]
    subprocess.run(
        [*command, f"-Wl,--version-script={script}", "-lrt", "-lpthread", "-ldl"],
        check=True,
        capture_output=True,
        text=True,
    )
    script.unlink()
    partial.replace(library)
