# SPDX-License-Identifier: Apache-2.0
"""The limits on calls under way, calls a minute and tokens a minute."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import pytest

from tandem.rewards.rate_limit import RateLimitedRewards, RateLimits
from tandem.types import RewardOutcome, RewardRequest, RewardStatus


class Service:
    """A reward pool that notes when its calls begin, and how many are under way at most."""

    def __init__(self, *, takes_groups: bool = False) -> None:
        self._takes_groups = takes_groups
        self.starts_s: list[float] = []
        self.sizes: list[int] = []
        self.num_under_way = self.most_under_way = 0

    async def takes_groups(self) -> bool:
        return self._takes_groups

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        self.starts_s.append(asyncio.get_running_loop().time())
        self.sizes.append(len(requests))
        self.num_under_way += 1
        self.most_under_way = max(self.most_under_way, self.num_under_way)
        for _ in range(5):
            await asyncio.sleep(0)
        self.num_under_way -= 1
        return [RewardOutcome(RewardStatus.VALUE, float(row.solution)) for row in requests]


def scores(service: Service, limits: RateLimits, num_requests: int) -> list[float]:
    async def work() -> list[RewardOutcome]:
        limited = RateLimitedRewards(service, limits)
        return await limited.score(
            [RewardRequest("s", str(index), "", {}, 1) for index in range(num_requests)]
        )

    return [outcome.score for outcome in asyncio.run(work())]


def test_no_more_calls_are_under_way_than_allowed_and_the_order_is_kept() -> None:
    service = Service()
    assert scores(service, RateLimits(3), 10) == [*range(10)]
    assert service.most_under_way == 3 and service.sizes == [1] * 10


def test_a_batch_function_is_called_once() -> None:
    service = Service(takes_groups=True)
    assert scores(service, RateLimits(1), 4) == [0, 1, 2, 3]
    assert service.sizes == [4]


def test_calls_begin_an_interval_apart() -> None:
    """A call may begin later than it could, never sooner."""
    service = Service()
    begin_s = time.monotonic()
    scores(service, RateLimits(8, max_calls=1200), 5)
    earliest_s = [begin_s + 0.05 * number - 1e-3 for number in range(5)]
    assert all(start >= least for start, least in zip(service.starts_s, earliest_s, strict=True))


@pytest.mark.parametrize(
    ("limits", "interval_s"),
    [
        (RateLimits(1), 0.0),
        (RateLimits(1, max_calls=30), 2.0),
        (RateLimits(1, max_tokens=6000, tokens_per_call=500), 5.0),
        (RateLimits(1, max_calls=30, max_tokens=6000, tokens_per_call=100), 2.0),
    ],
)
def test_the_stricter_rate_decides(limits: RateLimits, interval_s: float) -> None:
    assert limits.interval_s == interval_s
