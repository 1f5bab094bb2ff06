# SPDX-License-Identifier: Apache-2.0
"""The compiled half of the doubles: built when it is first wanted, then kept in the user's cache.

One build serves all doubles and all processes; another version of torch or of the sources is
another build. It needs a C++ compiler and Python's headers, nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from tandem.errors import UserError

_NAME = "tandem_double"
_SOURCES = Path(__file__).parent / "native"
_FLAGS = ("-shared", "-fPIC", "-O1", "-std=c++20", "-DTORCH_API_INCLUDE_EXTENSION_H")
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")
_LAST_LINES = 5


def open_extension() -> ModuleType:
    """The extension, loaded into this process.

    Raises:
        UserError: it has to be built and cannot be.
    """
    path = built_extension()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None, f"{path} is no extension module"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_extension() -> Path:
    """The library's file. The first call builds it, which takes a minute; others wait for that.

    Raises:
        UserError: it cannot be built here.
    """
    folder = _cache_folder() / _fingerprint()
    path = folder / f"{_NAME}.so"
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _build(path)
    return path


def build_problem() -> str:
    """Why the extension cannot be built here; "" if nothing is known to be missing."""
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(_compiler()) is None:
        return f"there is no C++ compiler ({_compiler()}; CXX names another)"
    return "" if header.is_file() else f"Python's headers are missing ({header})"


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tandem" / "doubles"


def _compiler() -> str:
    return os.environ.get("CXX") or "c++"


def _fingerprint() -> str:
    """Of all that decides what is built."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {_FLAGS}".encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _build(path: Path) -> None:
    problem = build_problem()
    if problem:
        raise UserError(f"vendor doubles: {problem}. Install it; doubles are built on first use.")
    torch_folder = Path(torch.__file__).parent
    include = torch_folder / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        result = Path(scratch) / path.name
        command = [
            *(_compiler(), *_FLAGS, f"-DTORCH_EXTENSION_NAME={_NAME}"),
            *(f"-isystem{folder}" for folder in folders),
            *(str(source) for source in sorted(_SOURCES.glob("*.cpp"))),
            *(f"-L{torch_folder / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)),
            *("-o", str(result)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise UserError(
                f"vendor doubles: the compiler failed: {'; '.join(errors[:_LAST_LINES])}. "
                f"The command was: {' '.join(command)}"
            )
        os.replace(result, path)
