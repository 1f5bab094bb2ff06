# SPDX-License-Identifier: Apache-2.0
"""The lock of a run folder: two runs in one folder would mix their checkpoints and records.

The kernel holds the lock and releases it however its owner ends, so the file that a killed run
leaves locks nothing. The process id in the file is only for the error message.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
_LOOK_S = 0.5
"""How long a folder must be in use: a command that only looks holds the lock for a moment."""
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Reserve ``folder`` for this process.

    Raises:
        UserError: another process uses the folder, or it is not writable.
    """
    path = folder / LOCK_NAME
    try:
        descriptor = _acquire(path)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        raise _in_use(folder) from error
    except OSError as error:
        raise UserError(
            "trainer.default_local_dir",
            str(folder),
            rule=f"cannot be written ({error.strerror or error})",
            remedy="Choose another folder, or free some space.",
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def require_free(folder: Path) -> None:
    """Raise UserError if another process uses ``folder``; change nothing."""
    try:
        descriptor = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return  # a folder without a lock, or without a right that ``exclusive`` will miss
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _in_use(folder) from error
    except OSError:
        return  # a file system without locks
    finally:
        os.close(descriptor)


def _in_use(folder: Path) -> UserError:
    return UserError(
        "trainer.default_local_dir",
        str(folder),
        rule=f"another run is using the folder{_owner(folder / LOCK_NAME)}",
        remedy="Wait for its end, stop it, or choose another folder.",
    )


def _acquire(path: Path) -> int:
    """Open and lock the file. Raise BlockingIOError if another process has locked it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            if _is_still_there(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        # The last owner removed the file after it was opened here.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    deadline_s = time.monotonic() + _LOOK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:  # perhaps by ``require_free``, for a moment
            if time.monotonic() > deadline_s:
                raise
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            logger.warning(
                "%s: this file system has no locks; make sure that no other run uses the folder",
                path,
            )
            return
        time.sleep(_LOOK_S / 10)


def _is_still_there(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _owner(path: Path) -> str:
    try:
        text = path.read_text().strip()
    except OSError:
        return ""
    return f" (process {text})" if text.isdigit() else ""
