# SPDX-License-Identifier: Apache-2.0
"""Compilation of the doubles' native parts on first use, with a cache in the user's home folder.

All processes share a build. Other sources or arguments make another build. A build needs a C++
compiler and nothing else.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

from tandem.errors import UserError

NATIVE = Path(__file__).parent / "native"
_LAST_LINES = 5
_EXTENSION = "tandem_double"
_FLAGS = (
    "-O1",
    "-std=c++20",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    f"-DTORCH_EXTENSION_NAME={_EXTENSION}",
)
_LIBRARIES = ("c10", "torch_cpu", "torch", "torch_python")


class MissingToolError(UserError):
    """A missing compiler, or missing files of other software; the sources are correct."""


@dataclass(frozen=True, slots=True)
class Build:
    """The recipe of a library.

    Attributes:
        file: the library's path in the folder of this build.
        sources: the files to compile, at the same time.
        arguments: the compiler's arguments before a source.
        libraries: the linker's arguments.
        included: other files that influence the result.
        needed: required files of other software, by the name of the software.
        conditions: other influences on the result, such as versions.
    """

    file: str
    sources: tuple[Path, ...]
    arguments: tuple[str, ...]
    libraries: tuple[str, ...]
    included: tuple[Path, ...] = ()
    needed: Mapping[str, Path] = field(default_factory=dict[str, Path])
    conditions: str = ""

    @property
    def fingerprint(self) -> str:
        """The hash of everything that influences the result."""
        decided = (self.conditions, self.arguments, self.libraries)
        digest = hashlib.sha256(repr(decided).encode())
        for source in (*self.sources, *self.included):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]


def built(build: Build) -> Path:
    """Return the library's file. The first call builds it; concurrent calls wait for it.

    Raises:
        MissingToolError: a compiler or a required file is missing.
        UserError: the compiler failed.
    """
    folder = _cache_folder() / build.fingerprint
    path = folder / build.file
    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.is_file():
            _compile(build, path)
    return path


def _cache_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "tandem" / "doubles"


def _compile(build: Build, path: Path) -> None:
    compiler = os.environ.get("CXX") or "c++"
    missing = [
        f"{name} are missing ({file})" for name, file in build.needed.items() if not file.is_file()
    ]
    if shutil.which(compiler) is None:
        missing.append(f"there is no C++ compiler ({compiler}; CXX names another)")
    if missing:
        raise MissingToolError(
            "vendor doubles",
            rule=" and ".join(missing),
            remedy="Install it; doubles are built on first use.",
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        scratch = Path(folder)
        objects = [scratch / f"{source.stem}.o" for source in build.sources]
        compiling = [
            [compiler, "-fPIC", *build.arguments, "-c", str(source), "-o", str(result)]
            for source, result in zip(build.sources, objects, strict=True)
        ]
        _run_together(compiling)
        library = str(scratch / path.name)
        linking = [compiler, "-shared", *map(str, objects), *build.libraries, "-o", library]
        _run_together([linking])
        os.replace(library, path)


def _run_together(commands: Sequence[list[str]]) -> None:
    """Run commands of the compiler at the same time.

    Raises:
        UserError: one failed.
    """
    running = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    said = [process.communicate()[1] for process in running]
    for command, process, stderr in zip(commands, running, said, strict=True):
        if process.returncode:
            errors = [line for line in stderr.splitlines() if "error" in line]
            raise UserError(
                "vendor doubles",
                rule=f"the compiler failed: {'; '.join(errors[:_LAST_LINES])}",
                remedy=f"The command was: {' '.join(command)}",
            )


def open_extension() -> ModuleType:
    """Load into this process the torch extension that all device doubles share.

    Raises:
        UserError: it cannot be built here.
    """
    path = built_extension()
    spec = importlib.util.spec_from_file_location(_EXTENSION, path)
    assert spec is not None, f"{path} is not an extension module"
    assert spec.loader is not None, f"{path} cannot be loaded"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def built_extension() -> Path:
    """Return the file of torch's extension. The first call builds it, in a quarter of a minute.

    Each version of torch needs its own build, and each build needs Python's headers.

    Raises:
        UserError: it cannot be built here.
    """
    torch_folder, headers = Path(torch.__file__).parent, Path(sysconfig.get_paths()["include"])
    include = torch_folder / "include"
    folders = (include, include / "torch/csrc/api/include", headers)
    return built(
        Build(
            file=f"{_EXTENSION}.so",
            sources=tuple(sorted(NATIVE.glob("*.cpp"))),
            # -I goes before the folders of CPATH, which may have the headers of another torch.
            arguments=(*_FLAGS, *(f"-I{folder}" for folder in folders)),
            libraries=(f"-L{torch_folder / 'lib'}", *(f"-l{name}" for name in _LIBRARIES)),
            included=tuple(sorted(NATIVE.glob("*.h"))),
            needed={"Python's headers": headers / "Python.h"},
            conditions=f"{torch.__version__} {sys.version}",
        )
    )
