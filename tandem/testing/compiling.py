# SPDX-License-Identifier: Apache-2.0
"""The compiled parts of the doubles: each is built when it is first wanted, then kept in the user's
cache. One build serves all processes; other sources or arguments are another build. A C++ compiler
is all it needs.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tandem.errors import UserError

NATIVE = Path(__file__).parent / "native"
_SHARED = ("-shared", "-fPIC")
_LAST_LINES = 5


class MissingToolError(UserError):
    """What it takes to build is not installed; the sources are not at fault."""


@dataclass(frozen=True, slots=True)
class Build:
    """What a library is made of.

    Attributes:
        file: its path in the folder of this build.
        sources: what is compiled. ``included``: what else decides the result.
        arguments: before the sources. ``libraries``: arguments after them.
        needed: files of other software without which it cannot be built, by what they are of.
        conditions: others that decide the result, such as versions.
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
        """Of all that decides what is built."""
        decided = (self.conditions, _SHARED, self.arguments, self.libraries)
        digest = hashlib.sha256(repr(decided).encode())
        for source in (*self.sources, *self.included):
            digest.update(source.read_bytes())
        return digest.hexdigest()[:16]


def built(build: Build) -> Path:
    """The library's file. The first call builds it; others wait for that.

    Raises:
        MissingToolError: a compiler or what the build needs is missing.
        UserError: it failed.
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
        f"{what} are missing ({file})" for what, file in build.needed.items() if not file.is_file()
    ]
    if shutil.which(compiler) is None:
        missing.append(f"there is no C++ compiler ({compiler}; CXX names another)")
    if missing:
        raise MissingToolError(
            f"vendor doubles: {' and '.join(missing)}. Install it; doubles are built on first use."
        )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        result = Path(scratch) / path.name
        command = [
            *(compiler, *_SHARED, *build.arguments),
            *(*map(str, build.sources), *build.libraries),
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
