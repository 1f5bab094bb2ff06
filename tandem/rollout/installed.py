# SPDX-License-Identifier: Apache-2.0
"""The place and the version of an installed package, in this interpreter or in another one.

Nothing imports the package.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_LOOK = """
import json, sys
from importlib import metadata, util
spec, version = util.find_spec(sys.argv[1]), None
for name in sys.argv[2:]:
    try:
        version = version or metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps([version, spec and spec.origin]))
"""
_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class Installed:
    """An installed package: its version and the folder of its module."""

    version: str
    folder: Path


def find_package(
    module: str, distributions: Sequence[str], *, interpreter: str | None = None
) -> Installed | None:
    """Return where a package is; None if it is missing.

    Args:
        distributions: the names under which it may be installed.
        interpreter: the Python to look in; None: this one.

    Raises:
        OSError: the interpreter does not run.
    """
    if interpreter is None:
        version, origin = _here(module, distributions)
    else:
        version, origin = _there(interpreter, module, distributions=tuple(distributions))
    if version is None or origin is None:
        return None
    return Installed(version, Path(origin).parent)


def _here(module: str, distributions: Sequence[str]) -> tuple[str | None, str | None]:
    spec = find_spec(module)
    if spec is None:
        return None, None
    for name in distributions:
        try:
            return metadata.version(name), spec.origin
        except metadata.PackageNotFoundError:
            continue
    return None, None


@lru_cache
def _there(
    interpreter: str, module: str, *, distributions: tuple[str, ...]
) -> tuple[str | None, str | None]:
    command = [interpreter, "-I", "-c", _LOOK, module, *distributions]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
        version, origin = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        raise OSError(0, "it is not a Python interpreter") from error
    return version, origin
