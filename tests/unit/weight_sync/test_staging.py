# SPDX-License-Identifier: Apache-2.0
"""Which copy takes in a version, and which version is put in use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tandem.types import HeldSlice
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.staging import StagedVersions
from tandem.weight_sync.transfer import MessageStream, Transfer


@dataclass(frozen=True)
class _Room:
    """A copy in which nothing ever arrives."""

    name: str

    def receiving(self, transfer: Transfer) -> MessageStream:
        raise NotImplementedError

    def replace(self, transfer: Transfer, live: Sequence[HeldSlice]) -> int:
        raise NotImplementedError


ONLY, OTHER = _Room("only"), _Room("other")


def test_with_one_copy_an_unused_version_is_given_up_for_the_next() -> None:
    arrivals = StagedVersions([ONLY])
    assert arrivals.claim(1) is ONLY
    with arrivals.taking() as taken:
        assert taken is None, "half a version is none"
    arrivals.arrive(ONLY, 1)
    assert arrivals.claim(1) is ONLY
    with arrivals.taking() as taken:
        assert taken is None, "version 1 is being overwritten"
    arrivals.arrive(ONLY, 2)
    with arrivals.taking() as taken:
        assert taken == (2, ONLY)
    with arrivals.taking() as taken:
        assert taken is None, "it is not new any more"


def test_with_two_copies_a_whole_version_stays_until_a_later_one_is_whole() -> None:
    arrivals = StagedVersions([ONLY, OTHER])
    arrivals.arrive(arrivals.claim(1), 1)
    assert arrivals.claim(1) is OTHER
    with arrivals.taking() as taken:
        assert taken == (1, ONLY)
        arrivals.arrive(OTHER, 2)
    with arrivals.taking() as taken:
        assert taken == (2, OTHER), "what arrived meanwhile is still new"
    arrivals.arrive(arrivals.claim(1), 3)
    arrivals.arrive(arrivals.claim(1), 4)
    arrivals.arrive(arrivals.claim(1), 5)
    with arrivals.taking() as taken:
        assert taken is not None
        assert taken[0] == 5


def test_weights_that_cannot_be_put_in_use_now_can_be_later() -> None:
    arrivals = StagedVersions([ONLY])
    arrivals.arrive(arrivals.claim(1), 1)
    with pytest.raises(SyncError, match="in use"), arrivals.taking():
        raise SyncError("weights are in use")
    with arrivals.taking() as taken:
        assert taken == (1, ONLY)


def test_a_copy_that_is_being_put_in_use_is_not_claimed() -> None:
    arrivals = StagedVersions([ONLY])
    arrivals.arrive(arrivals.claim(1), 1)
    claimed = threading.Event()

    def claim() -> None:
        arrivals.claim(5)
        claimed.set()

    with arrivals.taking():
        with pytest.raises(SyncError, match=r"for longer than 0\.01 s"):
            arrivals.claim(0.01)
        thread = threading.Thread(target=claim)
        thread.start()
        assert not claimed.wait(0.05)
    assert claimed.wait(5)
    thread.join()


def test_waiting_ends_with_the_version_a_later_one_or_none() -> None:
    for is_coming in (True, False):
        arrivals = StagedVersions([ONLY])
        arrivals.wait(1)
        arrivals.expect()
        waiting = threading.Thread(target=arrivals.wait, args=(2,), daemon=True)
        waiting.start()
        arrivals.arrive(arrivals.claim(1), 1)
        waiting.join(0.05)
        assert waiting.is_alive()
        if is_coming:
            arrivals.arrive(arrivals.claim(1), 3)
        else:
            arrivals.settle()
        waiting.join(5)
        assert not waiting.is_alive()
