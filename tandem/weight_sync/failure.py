# SPDX-License-Identifier: Apache-2.0
"""The error of weight transfers, and a record of a failure that concerns one process alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class SyncError(RuntimeError):
    """A failed transfer, described in one line that names the tensor and the processes.

    Every process of the link raises it.
    """


class FirstFailure:
    """The first failure of this process in a transfer.

    A process that failed keeps taking part in collectives, so that no other process hangs, and
    reports the cause when the processes next compare their results.
    """

    def __init__(self) -> None:
        self.cause = ""

    @contextmanager
    def noted(self, doing: str) -> Iterator[None]:
        """Keep an error of the block that concerns this process alone, and suppress it."""
        try:
            yield
        except (RuntimeError, ValueError, TypeError, LookupError, OSError) as error:
            text = " ".join(str(error).split())
            self.cause = self.cause or (
                text if isinstance(error, SyncError) else f"{doing}: {text}"
            )
