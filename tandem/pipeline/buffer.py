# SPDX-License-Identifier: Apache-2.0
"""The groups between admission and training.

Batches are formed here and nowhere else. The admission gate bounds the number of groups. A batch
takes the complete groups that were drawn first. It may pass over a group that is still being
generated, so that a straggler delays its group and not the batch, but only if every group left
behind can still be trained on in time: a group admitted under version v must be trained on by
version v + max_lag at the latest. With at most ``(max_lag + 1) * batch_size`` admission slots such
a batch always exists once enough groups are complete.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tandem.types import Group


@dataclass(frozen=True, slots=True)
class BatchRule:
    """The rule for forming batches.

    Attributes:
        batch_size: the number of groups in a batch.
        max_lag: the maximum number of versions by which a group may lag behind the weights that it
            trains.
        passes_over: whether a batch may leave out a group that is not complete yet.
    """

    batch_size: int
    max_lag: int
    passes_over: bool


class GroupBuffer:
    """The buffer of admitted groups. ``put``, ``drop``, ``wake`` and ``close`` unblock its waits.

    Example:
        batch_size=2, max_lag=1; draws 0 to 3 were admitted under version 0. With 0, 2 and 3
        complete the batch of version 0 is [0, 2]; the batch of version 1 must wait for 1.
    """

    def __init__(self, rule: BatchRule) -> None:
        self._rule = rule
        self._versions: dict[int, int] = {}
        self._complete: dict[int, Group] = {}
        self._closed = False
        self._changed = asyncio.Condition()

    @property
    def num_complete(self) -> int:
        """The number of groups that are ready to be trained on."""
        return len(self._complete)

    def expect(self, uids: Iterable[int], version: int) -> None:
        """Note that draws have been admitted while ``version`` was in use."""
        self._versions.update(dict.fromkeys(uids, version))

    async def put(self, group: Group) -> None:
        """Add an expected group that is complete."""
        async with self._changed:
            self._complete[group.prompt.uid] = group
            self._changed.notify_all()

    async def drop(self, uids: Iterable[int]) -> None:
        """Forget draws that will not be trained on."""
        async with self._changed:
            for uid in uids:
                del self._versions[uid]
            self._changed.notify_all()

    async def close(self) -> None:
        """End all waits. ``take`` then returns the complete groups, perhaps too few."""
        async with self._changed:
            self._closed = True
            self._changed.notify_all()

    async def take(self, version: int) -> list[Group]:
        """Return the batch to train the weights ``version`` on, in the order of the draws.

        It has fewer than ``batch_size`` groups only after ``close``.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._choose(version) is not None)
            chosen = self._choose(version) or sorted(self._complete)[: self._rule.batch_size]
            for uid in chosen:
                del self._versions[uid]
            return [self._complete.pop(uid) for uid in chosen]

    async def wait_complete(self, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Return once every admitted group is complete, the buffer is closed, or ``unless`` holds.

        Call ``wake`` when ``unless`` begins to hold.
        """
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._closed or unless() or len(self._complete) == len(self._versions)
            )

    async def wake(self) -> None:
        """Let all waits look again."""
        async with self._changed:
            self._changed.notify_all()

    def _choose(self, version: int) -> list[int] | None:
        size = self._rule.batch_size
        chosen = sorted(self._complete)[:size]
        if len(chosen) < size:
            return None
        left = sorted(self._versions.keys() - set(chosen))
        if left and left[0] < chosen[-1] and not self._rule.passes_over:
            return None
        for position, uid in enumerate(left):
            trained_on_at = version + 1 + position // size
            if trained_on_at - self._versions[uid] > self._rule.max_lag:
                return None
        return chosen
