# SPDX-License-Identifier: Apache-2.0
"""The log of the reward functions: what they print, and the traceback of their first error.

The reward processes append to ``rewards.log`` themselves, so that a process that is killed loses
nothing. The run reads the file to show its first lines among its own messages.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tandem.types import RewardOutcome, RewardRequest

logger = logging.getLogger(__name__)

REWARD_LOG_FILE = "rewards.log"
"""The file in the run folder."""
_MAX_LINES_SHOWN = 10


class Scores(Protocol):
    """A scorer of samples."""

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]: ...


class LoggedRewards:
    """A scorer that logs the first new lines of a reward log."""

    def __init__(self, rewards: Scores, path: Path) -> None:
        self._rewards = rewards
        self._path = path
        self._num_read = path.stat().st_size if path.exists() else 0
        self._num_shown = 0

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Return the outcome of each request, in their order."""
        try:
            return await self._rewards.score(requests)
        finally:
            self._show()

    def _show(self) -> None:
        if self._num_shown >= _MAX_LINES_SHOWN or not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            lines = file.readlines(1 << 16)
        for line in lines:
            if not line.endswith(b"\n"):
                return
            self._num_read += len(line)
            self._num_shown += 1
            logger.info("%s", line.decode(errors="replace").rstrip())
            if self._num_shown == _MAX_LINES_SHOWN:
                logger.info("further output of the reward functions is in %s", self._path)
                return
