# SPDX-License-Identifier: Apache-2.0
"""One process a run folder: two runs in one folder would mix their checkpoints and records.

The kernel holds the lock and gives it back when its owner ends, however it ends, so that the file
of a killed run locks nothing. The owner's process id in the file is for the message only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
_WITHOUT_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)


@contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Keep ``folder`` to this process.

    Raises:
        UserError: another process has it, or nothing can be written there.
    """
    path = folder / LOCK_NAME
    try:
        descriptor = _acquire(path)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except BlockingIOError as error:
        raise UserError(
            f"trainer.default_local_dir={str(folder)!r}: another run is using the folder"
            f"{_owner(path)}. Wait for its end, stop it, or choose another folder."
        ) from error
    except OSError as error:
        raise UserError(
            f"trainer.default_local_dir={str(folder)!r}: cannot be written "
            f"({error.strerror or error}). Choose another folder, or free some space."
        ) from error
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _acquire(path: Path) -> int:
    """Open and lock the file. Raises BlockingIOError if another process has locked it."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor, path)
            if _is_still_there(descriptor, path):
                return descriptor
        except OSError:
            os.close(descriptor)
            raise
        # Its last owner has removed the file after we had opened it.
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        logger.warning(
            "%s: this file system has no locks; take care that no other run uses it", path
        )


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
