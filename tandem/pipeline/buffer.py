# SPDX-License-Identifier: Apache-2.0
"""Scored groups between the producer and the trainer. Its size is bounded by the admission gate,
not here.
"""

from __future__ import annotations

import asyncio

from tandem.types import Group


class GroupBuffer:
    """Consumes: scored groups. Waits for: enough of them. Unblocked by: ``put`` and ``close``."""

    def __init__(self) -> None:
        self._groups: list[Group] = []
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, group: Group) -> None:
        """Add one group."""
        async with self._changed:
            self._groups.append(group)
            self._changed.notify_all()

    async def close(self) -> None:
        """No more groups will be waited for: ``take`` returns what there is."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self, count: int) -> list[Group]:
        """The ``count`` groups drawn first, in order of their draw; fewer only after ``close``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._groups) >= count)
            self._groups.sort(key=lambda group: group.prompt.uid)
            taken, self._groups = self._groups[:count], self._groups[count:]
            return taken
