# SPDX-License-Identifier: Apache-2.0
"""A limit on the rate of reward calls, for functions that call a service (``rate_limited``).

It holds for the whole run: a call waits until it may start, and its time limit begins then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.types import RewardOutcome, RewardRequest

_SECONDS_PER_MINUTE = 60.0


@dataclass(frozen=True, slots=True)
class RateLimits:
    """The limits of a service.

    Attributes:
        max_concurrent: the maximum number of calls under way.
        max_calls: the maximum number of calls per minute; None without a limit.
        max_tokens: the maximum number of tokens per minute; None without a limit.
        tokens_per_call: the tokens that one call counts.
    """

    max_concurrent: int
    max_calls: int | None = None
    max_tokens: int | None = None
    tokens_per_call: int = 0

    @property
    def interval_s(self) -> float:
        """The time between the starts of two calls, by the stricter of both rates."""
        by_calls = 0.0 if self.max_calls is None else 1 / self.max_calls
        by_tokens = 0.0 if self.max_tokens is None else self.tokens_per_call / self.max_tokens
        return _SECONDS_PER_MINUTE * max(by_calls, by_tokens)


class Pool(Protocol):
    """A scorer that knows whether the requests of a call are scored together."""

    async def takes_groups(self) -> bool: ...

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]: ...


class RateLimitedRewards:
    """A reward pool whose calls start one after another, ``interval_s`` apart."""

    def __init__(self, pool: Pool, limits: RateLimits) -> None:
        self._pool = pool
        self._interval_s = limits.interval_s
        self._next_start_s = 0.0
        self._slots = asyncio.Semaphore(limits.max_concurrent)

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Return the outcome of each request, in their order; see ``RewardPool.score``."""
        together = await self._pool.takes_groups()
        calls = [requests] if together else [[request] for request in requests]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._call(call)) for call in calls]
        return [outcome for task in tasks for outcome in task.result()]

    async def _call(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        async with self._slots:
            await self._wait_for_turn()
            return await self._pool.score(requests)

    async def _wait_for_turn(self) -> None:
        now_s = asyncio.get_running_loop().time()
        start_s = max(now_s, self._next_start_s)
        self._next_start_s = start_s + self._interval_s
        await asyncio.sleep(start_s - now_s)
