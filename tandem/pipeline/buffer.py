# SPDX-License-Identifier: Apache-2.0
"""Scored groups between the producer and the trainer. Its size is bounded by the admission gate,
not here.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from tandem.types import Group, RewardOutcome


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """A group ready to be trained on; ``baseline`` is the reward of the greedy answer to the same
    prompt, for ``remax`` only.
    """

    group: Group
    baseline: RewardOutcome | None = None


class GroupBuffer:
    """Consumes: scored groups. Waits for: enough of them. Unblocked by: ``put`` and ``close``."""

    def __init__(self) -> None:
        self._groups: list[ScoredGroup] = []
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, scored: ScoredGroup) -> None:
        """Add one group."""
        async with self._changed:
            self._groups.append(scored)
            self._changed.notify_all()

    async def close(self) -> None:
        """No more groups will be waited for: ``take`` returns what there is."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self, count: int) -> list[ScoredGroup]:
        """The ``count`` groups drawn first, in order of their draw; fewer only after ``close``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._groups) >= count)
            self._groups.sort(key=lambda scored: scored.group.prompt.uid)
            taken, self._groups = self._groups[:count], self._groups[count:]
            return taken
