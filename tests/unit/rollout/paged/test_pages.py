# SPDX-License-Identifier: Apache-2.0
"""Pages have as many owners as were counted, and none is lost or given out twice."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tandem.rollout.paged.pages import PagePool


def test_low_pages_first_and_each_once() -> None:
    pool = PagePool(5)
    assert pool.take(2) == [0, 1]
    assert pool.take(3) == [2, 3, 4]
    assert (pool.num_free, pool.take(0)) == (0, [])
    pool.release([1, 3])
    assert sorted(pool.take(2)) == [1, 3]


def test_a_shared_page_is_free_when_its_last_owner_has_left() -> None:
    pool = PagePool(3)
    pages = pool.take(2)
    pool.share(pages, owners=2)
    for free_after in (1, 1, 3):
        pool.release(pages)
        assert pool.num_free == free_after


def test_more_than_there_is_and_more_than_was_taken() -> None:
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="3 pages wanted, 2 free"):
        pool.take(3)
    pages = pool.take(1)
    pool.release(pages)
    with pytest.raises(AssertionError, match="more often than taken"):
        pool.release(pages)


def test_owners_are_counted_over_a_long_time() -> None:
    rng, pool, owned = random.Random(0), PagePool(20), list[list[int]]()
    for _ in range(2000):
        if rng.random() < 0.5 and pool.num_free:
            pages = pool.take(rng.randint(1, pool.num_free))
            owners = rng.randint(1, 3)
            pool.share(pages, owners=owners - 1)
            held = {page for pages in owned for page in pages}
            assert held.isdisjoint(pages)
            owned += [pages] * owners
        elif owned:
            pool.release(owned.pop(rng.randrange(len(owned))))
        counts = Counter(page for pages in owned for page in pages)
        assert pool.num_free == 20 - len(counts)
    for pages in owned:
        pool.release(pages)
    assert sorted(pool.take(20)) == list(range(20))
