# SPDX-License-Identifier: Apache-2.0
"""The manifest of a checkpoint: the size and the CRC-32 of each of its files.

It finds damage, such as a flipped bit or a cut, anywhere in a checkpoint, itself included. CRC-32
finds every change of up to 32 neighbouring bits, and misses one in four billion of others. It is no
protection against a person who changes files on purpose.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

MANIFEST_NAME = "manifest.json"
_CHUNK_BYTES = 256 * 1024
"""The size of a read. With megabytes, the resident memory of long runs grows from save to save."""
_MAX_THREADS = 8

Facts = dict[str, Any]
"""The facts of one file: ``bytes`` and ``crc32``."""


def write_manifest(folder: Path) -> None:
    """Write the manifest of all files below ``folder``. Raise OSError if one cannot be read."""
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in files if name != MANIFEST_NAME)
    facts = dict(zip(names, _all_facts(folder / name for name in names), strict=True))
    (folder / MANIFEST_NAME).write_bytes(_render(facts))


def find_damage(folder: Path) -> list[str] | None:
    """Return one phrase for each damaged file of a checkpoint, None if it has no manifest.

    Files that the manifest does not list are ignored.
    """
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        return None
    try:
        listed = _parse(path.read_bytes())
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return [f"{MANIFEST_NAME} is damaged"]
    suspects = {name: _size_damage(folder / name, facts) for name, facts in listed.items()}
    unread = [name for name, damage in suspects.items() if not damage]
    with _threads() as pool:
        contents = pool.map(lambda name: _content_damage(folder / name, listed[name]), unread)
        suspects |= zip(unread, contents, strict=True)
    return [f"{name} {damage}" for name, damage in suspects.items() if damage]


def _render(files: Mapping[str, Facts]) -> bytes:
    listed = json.dumps(files, sort_keys=True)
    manifest = {"crc32": f"{zlib.crc32(listed.encode()):08x}", "files": files}
    return (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode()


def _parse(content: bytes) -> dict[str, Facts]:
    """Return the facts by name. Raise an error of Python unless ``content`` is of ``_render``."""
    files = json.loads(content)["files"]
    facts = {
        name: {"bytes": int(one["bytes"]), "crc32": str(one["crc32"])}
        for name, one in files.items()
    }
    if _render(facts) != content:
        raise ValueError("its own checksum differs")
    return facts


def _all_facts(paths: Iterable[Path]) -> list[Facts]:
    with _threads() as pool:
        return list(pool.map(_facts, paths))


def _threads() -> ThreadPoolExecutor:
    # Files are read in parallel: zlib releases the interpreter's lock.
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1))


def _facts(path: Path) -> Facts:
    num_bytes, checksum = 0, 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            checksum = zlib.crc32(buffer[:count], checksum)
            num_bytes += count
    return {"bytes": num_bytes, "crc32": f"{checksum:08x}"}


def _size_damage(path: Path, facts: Facts) -> str:
    if not path.exists():
        return "is missing"
    if not path.is_file():
        return "is not a file"
    num_bytes = path.stat().st_size
    return "" if num_bytes == facts["bytes"] else f"has {num_bytes} of {facts['bytes']} bytes"


def _content_damage(path: Path, facts: Facts) -> str:
    try:
        return "" if _facts(path) == facts else "has other contents than were written"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
