# SPDX-License-Identifier: Apache-2.0
"""The folders that jailed programs may write to, in memory where this machine has such a place.

A process owns one locked place with all of its folders. A place whose owner was killed is removed
by the next process that opens one. Folders are measured and removed whatever their depth is, and
without following links. Files that were removed while a program holds them open are not measured.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress

MAX_FILES = 1000
"""The number of files and folders of a program."""
_MEMORY = "/dev/shm"
_PREFIX = "tandem-scratch-"
_YOUNG_S = 60.0
"""The age up to which a place is left alone: its owner may not have locked it yet."""
_BLOCK_BYTES = 512
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


class ScratchPlace:
    """A place of this process for folders of programs; it exists while there are any.

    Example:
        >>> place = ScratchPlace()
        >>> folder = place.make()
        >>> has_too_much(folder, max_bytes=1 << 20)
        False
        >>> place.remove(folder)
    """

    def __init__(self) -> None:
        is_there = os.access(_MEMORY, os.W_OK | os.X_OK)
        self._parent = _MEMORY if is_there else tempfile.gettempdir()
        self._folders: set[str] = set()
        self._path = ""
        self._lock = -1
        _remove_abandoned(self._parent)

    def make(self) -> str:
        """Return the path of a new empty folder."""
        if self._lock < 0:
            self._open()
        folder = tempfile.mkdtemp(dir=self._path)
        self._folders.add(folder)
        return folder

    def remove(self, folder: str) -> None:
        """Remove a folder with its content."""
        self._folders.remove(folder)
        if self._folders:
            _remove(os.path.basename(folder), self._lock)
        else:
            self.close()

    def close(self) -> None:
        """Remove all folders and the place; idempotent."""
        if self._lock >= 0:
            _remove_place(self._path, self._lock)
            os.close(self._lock)
            self._lock = -1
            self._folders.clear()

    def _open(self) -> None:
        self._path = tempfile.mkdtemp(prefix=_PREFIX, dir=self._parent)
        self._lock = os.open(self._path, _FOLDER)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Programs with a user of their own pass through it, and cannot list it.
        os.chmod(self._path, 0o711)


def has_too_much(folder: str, *, max_bytes: int) -> bool:
    """Return whether a folder has more than ``max_bytes`` or ``MAX_FILES``, or hides some."""
    num_bytes = num_files = 0
    try:
        for entry in _all_entries(folder):
            num_files += 1
            num_bytes += _size(entry)
            if num_bytes > max_bytes or num_files > MAX_FILES:
                return True
    except OSError:
        return True  # a folder cannot be listed, or lies too deep
    return False


def _all_entries(folder: str) -> Iterator[os.DirEntry[str]]:
    waiting = [folder]
    while waiting:
        for entry in _entries(waiting.pop()):
            yield entry
            if entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)


def _entries(folder: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            # Far more than are permitted are not read.
            return list(itertools.islice(entries, 10 * MAX_FILES))
    except FileNotFoundError:
        return []  # the program removed it meanwhile


def _size(entry: os.DirEntry[str]) -> int:
    """Return the bytes that a file takes, which may be fewer than its length."""
    try:
        return _BLOCK_BYTES * entry.stat(follow_symlinks=False).st_blocks
    except FileNotFoundError:
        return 0


def _remove(name: str, place: int) -> None:
    """Remove a folder of a place, whose descriptor is given.

    Folders below it are moved up first, so that no path is long. Nothing follows links, as a
    process that is still alive could put one anywhere below.
    """
    waiting, emptied = [name], []
    while waiting:
        emptied.append(waiting.pop())
        with suppress(OSError):  # what cannot be removed is left
            waiting += _empty(emptied[-1], place)
    for folder in reversed(emptied):
        with suppress(OSError):
            os.rmdir(folder, dir_fd=place)


def _empty(name: str, place: int) -> list[str]:
    """Remove the files of a folder and move its folders to the place; return their new names."""
    _make_listable(name, place)
    folder = os.open(name, _FOLDER, dir_fd=place)
    try:
        moved: list[str] = []
        for entry in os.listdir(folder):
            if _is_folder(entry, folder):
                _make_listable(entry, folder)
                moved.append(os.urandom(8).hex())
                os.rename(entry, moved[-1], src_dir_fd=folder, dst_dir_fd=place)
            else:
                os.unlink(entry, dir_fd=folder)
        return moved
    finally:
        os.close(folder)


def _is_folder(name: str, parent: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)


def _make_listable(name: str, parent: int) -> None:
    if os.geteuid():  # root can list all folders
        os.chmod(name, 0o700, dir_fd=parent)


def _remove_place(path: str, place: int) -> None:
    for name in os.listdir(place):
        _remove(name, place)
    with suppress(OSError):
        os.rmdir(path)


def _remove_abandoned(parent: str) -> None:
    """Remove the places of this user whose owners have ended."""
    for name in os.listdir(parent):
        if name.startswith(_PREFIX):
            with suppress(OSError):
                _remove_if_unlocked(os.path.join(parent, name))


def _remove_if_unlocked(path: str) -> None:
    status = os.lstat(path)
    if status.st_uid != os.geteuid() or status.st_mtime > time.time() - _YOUNG_S:
        return
    place = os.open(path, _FOLDER)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove_place(path, place)
    finally:
        os.close(place)
