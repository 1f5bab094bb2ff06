# SPDX-License-Identifier: Apache-2.0
"""The error of this room, and how a process that failed alone goes on until all can be told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SyncError(RuntimeError):
    """Weights did not arrive, in one line that names the tensor and the processes. Raised in every
    process of the link.
    """


class FirstFailure:
    """Remembers the first failure of this process, so that it keeps taking part in collectives and
    nobody hangs."""

    def __init__(self) -> None:
        self.cause = ""

    @contextmanager
    def noted(self, doing: str) -> Iterator[None]:
        """Errors of the block that concern this process alone end here."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, LookupError, OSError) as error:
            text = " ".join(str(error).split())
            self.cause = self.cause or (
                text if isinstance(error, SyncError) else f"{doing}: {text}"
            )
