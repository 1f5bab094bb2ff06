# SPDX-License-Identifier: Apache-2.0
"""Groups by FlagCX, with threads as their members and the stub as the library (A9)."""

from __future__ import annotations

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Event
from typing import Any, cast

import pytest
import torch
from torch._C._distributed_c10d import HashStore, Store

from tandem.comm.deadline import Deadline, GroupError
from tandem.comm.flagcx import find_obstacle, form_flagcx_group
from tandem.comm.flagcx_library import Abi, FlagcxLibrary, load_library
from tandem.comm.group import Group, GroupPlace
from tandem.errors import UserError
from tandem.testing.flagcx_stub import counters, stub_library
from tests.fakes.patience import LIMIT_S, sooner_than

pytestmark = pytest.mark.usefixtures("flagcx_stub")

MEMBERS = (1, 4, 6)
CPU = torch.device("cpu")
both_abis = pytest.mark.parametrize("abi", Abi)


def _no_handle(stream: object) -> int:
    raise AssertionError("the host has no streams")


def _form_one(store: Store, place: GroupPlace, *, abi: Abi) -> Group:
    library = load_library(stub_library(abi))
    return form_flagcx_group(store, place, library=library, stream_handle=_no_handle)


def _form(abi: Abi, *, name: str = "weights", timeout_s: float = 10) -> list[Group]:
    store = HashStore()
    places = [GroupPlace(name, MEMBERS, rank, CPU, timeout_s) for rank in MEMBERS]
    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(partial(_form_one, store, abi=abi), places))


def _close(groups: list[Group]) -> None:
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda group: group.close(), groups))


def _deadline(timeout_s: float = 10) -> Deadline:
    return Deadline(timeout_s, store=HashStore(), key="failure")


def _tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Return one tensor for each member, all different."""
    made = torch.Generator().manual_seed(3)
    values = torch.randint(0, 100, (3, *shape), generator=made)
    return list((values + torch.arange(3).reshape(-1, *[1] * len(shape))).to(dtype))


@both_abis
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.int8, torch.uint8, torch.bool, torch.float16]
)
@pytest.mark.parametrize("shape", [(1000,), (), (0, 5), (3, 100_001)])
def test_a9_a_broadcast_is_bit_exact(abi: Abi, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    groups = _form(abi)
    tensors = _tensors(dtype, shape)
    expected = tensors[1].clone()
    works = [g.broadcast(t, root=4) for g, t in zip(groups, tensors, strict=True)]
    for work in works:
        work.wait(_deadline())
    assert all(torch.equal(tensor, expected) for tensor in tensors)
    _close(groups)


@both_abis
def test_a9_broadcasts_keep_their_order(abi: Abi) -> None:
    groups = _form(abi)
    buckets = [[torch.full((9,), rank * 10 + i) for i in range(20)] for rank in MEMBERS]
    works = [
        group.broadcast(bucket, root=MEMBERS[i % 3])
        for group, own in zip(groups, buckets, strict=True)
        for i, bucket in enumerate(own)
    ]
    for work in works:
        work.wait(_deadline())
    for own in buckets:
        assert [int(bucket[0]) for bucket in own] == [MEMBERS[i % 3] * 10 + i for i in range(20)]
    _close(groups)


@both_abis
def test_a9_what_is_not_contiguous_is_rejected(abi: Abi) -> None:
    groups = _form(abi)
    with pytest.raises(ValueError, match=r"shape \(3, 2\) on cpu must be contiguous and on cpu"):
        groups[0].broadcast(torch.zeros(2, 3).t(), root=1)
    with pytest.raises(ValueError, match="on meta must be contiguous and on cpu"):
        groups[0].broadcast(torch.zeros(2, 3, device="meta"), root=1)
    with pytest.raises(GroupError, match="of the host"):
        groups[0].gather(1, _deadline())
    _close(groups)


@both_abis
def test_a9_a_failing_broadcast_raises_in_the_wait(
    abi: Abi, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = _form(abi)
    monkeypatch.setenv("FLAGCX_STUB_FAIL", "flagcxBroadcast:6")
    works = [group.broadcast(torch.zeros(9), root=6) for group in groups]
    for work in works:
        with pytest.raises(GroupError, match=r"^flagcxBroadcast: remote error \(FlagCX result 6\)"):
            work.wait(_deadline())
    monkeypatch.delenv("FLAGCX_STUB_FAIL")
    _close(groups)
    _close(groups)
    with pytest.raises(GroupError, match="closed"):
        groups[0].broadcast(torch.zeros(9), root=6)


@both_abis
def test_a9_a_wait_ends_with_its_deadline_and_leaving_does_not_wait(abi: Abi) -> None:
    groups = _form(abi)
    work = groups[0].broadcast(torch.zeros(9), root=6)
    behind = groups[0].broadcast(torch.zeros(9), root=6)
    with sooner_than():
        for pending in (work, behind):
            with pytest.raises(GroupError, match=r"within 0\.1 s"):
                pending.wait(_deadline(0.1))
        for group in groups:
            group.abandon()
            group.abandon()
            group.close()
    _close(_form(abi, name="formed anew"))


@both_abis
def test_a9_a_group_is_not_formed_without_all(abi: Abi) -> None:
    store = HashStore()
    place = GroupPlace("alone", (0, 1), 0, CPU, 0.2)
    with (
        sooner_than(),
        pytest.raises(GroupError, match=r"group alone: no answer from ranks \[1\] within 0\.2 s"),
    ):
        _form_one(store, place, abi=abi)


def test_a_connection_after_the_deadline_is_broken_off() -> None:
    arrival, broken_off = Event(), Event()

    class LateLibrary:
        """The stub, whose connections take until ``arrival``."""

        def __init__(self) -> None:
            self.stub = load_library(stub_library(Abi.DEVICE_HANDLE))

        def __getattr__(self, name: str) -> Any:
            return getattr(self.stub, name)

        def connect(self, unique_id: bytes, *, rank: int, size: int) -> int:
            arrival.wait(LIMIT_S)
            return self.stub.connect(unique_id, rank=rank, size=size)

        def abort(self, communicator: int) -> None:
            self.stub.abort(communicator)
            broken_off.set()

    place = GroupPlace("late", (0,), 0, CPU, 0.1)
    library = cast(FlagcxLibrary, LateLibrary())
    with pytest.raises(GroupError, match=r"group late: not all took part within 0\.1 s"):
        form_flagcx_group(HashStore(), place, library=library, stream_handle=_no_handle)
    arrival.set()
    assert broken_off.wait(LIMIT_S)


@both_abis
@pytest.mark.parametrize("function", ["flagcxGetUniqueId", "getVendor"])
def test_a9_all_members_learn_of_a_failure_at_once(
    abi: Abi, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGCX_STUB_FAIL", f"{function}:2")
    with sooner_than(), pytest.raises(GroupError, match=rf"rank 1: {function}: system error"):
        _form(abi, timeout_s=LIMIT_S)


def test_a9_members_of_different_interfaces_are_refused() -> None:
    store = HashStore()
    places = [GroupPlace("mixed", (0, 1), rank, CPU, 10) for rank in (0, 1)]
    with ThreadPoolExecutor(2) as pool:
        formed = [
            pool.submit(_form_one, store, place, abi=abi)
            for place, abi in zip(places, Abi, strict=True)
        ]
        for future in formed:
            with pytest.raises(UserError, match=r"rank 0 up to 0\.12, rank 1 from 0\.13"):
                future.result()


@both_abis
def test_a9_a_missing_symbol_fails_only_what_needs_it(abi: Abi) -> None:
    library = load_library(stub_library(abi, without=("flagcxCommAbort",)))
    place = GroupPlace("one", (0,), 0, CPU, 10)
    group = form_flagcx_group(HashStore(), place, library=library, stream_handle=_no_handle)
    group.broadcast(torch.zeros(9), root=0).wait(_deadline())
    group.abandon()
    library = load_library(stub_library(abi, without=("flagcxBroadcast",)))
    group = form_flagcx_group(HashStore(), place, library=library, stream_handle=_no_handle)
    with pytest.raises(UserError, match="does not export flagcxBroadcast"):
        group.broadcast(torch.zeros(9), root=0).wait(_deadline())
    group.close()


@both_abis
def test_a9_no_stream_is_copied_for_the_host(abi: Abi) -> None:
    before = counters(stub_library(abi))
    _close(_form(abi))
    assert counters(stub_library(abi)) == before


@pytest.mark.parametrize(
    ("vendors", "obstacle"),
    [
        (["MUSA"], ""),
        (["ASCEND", "ASCEND"], ""),
        (["NVIDIA", "NVIDIA", "MUSA"], ""),
        (["NVIDIA", "MLU", "MUSA"], ""),
        (["NVIDIA", "MUSA", "NVIDIA", "MUSA"], "follow each other, .* NVIDIA, MUSA, NVIDIA, MUSA"),
        (["NVIDIA", "ASCEND"], "does not connect ASCEND with NVIDIA"),
        (["MUSA", "NVIDIA", "ASCEND", "ASCEND"], "does not connect ASCEND with MUSA and NVIDIA"),
    ],
)
def test_what_flagcx_cannot_connect(vendors: list[str], obstacle: str) -> None:
    assert re.search(f"{obstacle}$", find_obstacle(vendors))
    assert bool(find_obstacle(vendors)) == bool(obstacle)


def test_logging_is_quiet_for_one_vendor(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        _close(_form(Abi.DEVICE_HANDLE))
    assert not caplog.records
