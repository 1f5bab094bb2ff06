# SPDX-License-Identifier: Apache-2.0
"""Standalone groups, with threads as their members."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from tandem.comm.deadline import Deadline, GroupError
from tandem.comm.group import Group, GroupPlace, form_group
from tests.fakes.patience import LIMIT_S, sooner_than

MEMBERS = (1, 4, 6)
CPU = torch.device("cpu")


def _form(store: HashStore, name: str, *, timeout_s: float = 5) -> list[Group]:
    """Form a group, and return the objects of all members."""
    places = [GroupPlace(name, MEMBERS, rank, CPU, timeout_s) for rank in MEMBERS]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(lambda place: form_group(store, place), places))


def test_broadcast_and_gather() -> None:
    store = HashStore()
    groups = _form(store, "first")
    deadline = Deadline(5, store=store, key="failure")
    buckets = [torch.full((1000,), rank, dtype=torch.uint8) for rank in MEMBERS]
    works = [group.broadcast(b, root=4) for group, b in zip(groups, buckets, strict=True)]
    for work in works:
        work.wait(deadline)
    assert all(bucket.eq(4).all() for bucket in buckets)
    values = [{"rank": 1}, "x" * 5000, ()]
    with ThreadPoolExecutor(3) as pool:
        gathered = pool.map(
            lambda pair: pair[0].gather(pair[1], deadline), zip(groups, values, strict=True)
        )
        assert list(gathered) == [values] * 3
        assert (
            list(pool.map(lambda g: g.gather(g.members, deadline), groups)) == [[MEMBERS] * 3] * 3
        )
    for group in groups:
        group.close()
        group.close()
    with pytest.raises(GroupError, match="closed"):
        groups[0].broadcast(buckets[0], root=1)


def test_a_member_that_leaves_ends_the_waits_of_the_others() -> None:
    store = HashStore()
    first, second, third = _form(store, "first")
    deadline = Deadline(5, store=store, key="failure")
    works = [group.broadcast(torch.zeros(9), root=6) for group in (first, second)]
    third.close()
    del third
    for work in works:
        with pytest.raises(GroupError, match="[Cc]onnection"):
            work.wait(deadline)
    assert [len(_form(store, "second")), len(_form(store, "third"))] == [3, 3], "formed anew"


def test_abandoning_does_not_wait_for_what_is_under_way() -> None:
    store = HashStore()
    groups = _form(store, "first", timeout_s=LIMIT_S)
    work = groups[0].broadcast(torch.zeros(9), root=6)
    with pytest.raises(GroupError, match=r"within 0\.2 s"):
        work.wait(Deadline(0.2, store=store, key="failure"))
    with sooner_than():
        groups[0].abandon()
        del work, groups[0]


def test_a_group_is_not_formed_without_all() -> None:
    with sooner_than(), pytest.raises(GroupError, match="group alone: "):
        form_group(HashStore(), GroupPlace("alone", (0, 1), 0, CPU, 0.2))


class MuteStore(Store):
    """Takes everything and never answers, whatever the time limit: so is a library that waits for
    a peer that is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.ending = threading.Event()

    def set(self, key: str, value: str) -> None:
        """Ignore the value."""

    def get(self, key: str) -> bytes:
        self.ending.wait()
        raise RuntimeError("the test is over")

    def wait(self, *_: object) -> None:
        self.get("")


def test_forming_ends_although_the_library_does_not() -> None:
    store = MuteStore()
    with (
        sooner_than(),
        pytest.raises(GroupError, match="group alone: not all members connected within 0.2 s"),
    ):
        form_group(store, GroupPlace("alone", (0, 1), 0, CPU, 0.2))
    store.ending.set()


def test_whatever_forming_raises_is_seen_at_once() -> None:
    place = GroupPlace("alone", (0, 1), 0, CPU, timeout_s=LIMIT_S, library="nobody's")
    with sooner_than(), pytest.raises(GroupError, match="has no nobody's in this process"):
        form_group(HashStore(), place)


def test_a_library_that_is_not_loaded_is_named() -> None:
    place = GroupPlace("one", (0,), 0, CPU, 5, "xyzccl")
    with pytest.raises(GroupError, match=r"torch\.distributed has no xyzccl in this process"):
        form_group(HashStore(), place)
