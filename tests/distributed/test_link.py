# SPDX-License-Identifier: Apache-2.0
"""Links whose processes are threads: versions stay whole, and failures end alike everywhere."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import Store

from tandem.comm.deadline import report_failure
from tandem.types import HeldSlice
from tandem.weight_sync.checksum import SAMPLING
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import LinkTensors
from tandem.weight_sync.link import Background, WeightLink, failure_key, open_link
from tandem.weight_sync.transfer import TransferReport
from tests.unit.weight_sync.faulty_group import corrupting, faulty
from tests.unit.weight_sync.layouts import (
    MODES,
    check_arrived,
    constant,
    cut,
    empty_copy,
    held,
    make_weights,
    place,
    receiving,
    sending,
    settings,
)
from tests.unit.weight_sync.threads import run_threads
from tests.unit.weight_sync.updates import update_often


def test_a_process_that_does_both_shares_storage_or_copies() -> None:
    def run(rank: int, store: Store) -> None:
        weights = make_weights()
        sends = cut(weights, (1, 1), rank=0)
        shared = [held_ for held_ in sends if held_.spec.name != "embed"]
        rooms = [room for room in empty_copy(weights, torch.bfloat16) if room.spec.name == "embed"]
        tensors = LinkTensors(sends=constant(sends), receives=constant([*shared, *rooms]))
        before = [held_.tensor.clone() for held_ in sends]
        link = open_link(store, place(rank, 1), tensors=tensors, settings=settings())
        assert link.transfer(4).received_bytes == 0
        assert link.gate.version == 4
        check_arrived([*shared, *rooms], weights)
        assert all(map(torch.equal, before, (held_.tensor for held_ in sends)))

    assert run_threads(run, 1) == [None]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_readers_never_see_two_versions(mode: dict[str, Any]) -> None:
    """A few updates; tests/distributed makes a thousand between processes."""

    def run(rank: int, store: Store) -> list[set[int]]:
        buckets = settings(512, 512, **mode)
        return update_often(store, place(rank, 2), settings=buckets, num_updates=20)

    for versions in run_threads(run, 2)[1]:
        assert len(versions) > 5, "readers met many versions"


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_bucket_sizes_decide_how_often_is_packed_and_loaded(mode: dict[str, Any]) -> None:
    def transfer(send_bytes: int, receive_bytes: int) -> list[tuple[TransferReport, int]]:
        def run(rank: int, store: Store) -> tuple[TransferReport, int]:
            slices = cut({"w": torch.arange(1024.0)}, (1, 1), rank=0)
            tensors = receiving(slices) if rank else sending(slices)
            buckets = settings(send_bytes, receive_bytes, **mode)
            link = open_link(store, place(rank, 2), tensors=tensors, settings=buckets)
            return link.transfer(1), link.num_loads

        return run_threads(run, 2)

    for send_bytes, receive_bytes, num_packs, num_loads in (
        (2048, 512, 2, 8),
        (512, 1 << 20, 8, 1),
    ):
        (sent, sender_loads), (received, receiver_loads) = transfer(send_bytes, receive_bytes)
        assert (sent.num_packs, receiver_loads) == (num_packs, num_loads)
        assert (sender_loads, received.num_packs) == (0, 0)
        assert sent.sent_bytes == received.received_bytes == 4096


WEIGHTS = make_weights()
NUM_MESSAGES = 6
"""Of a transfer of them to rollouts in bf16, by buckets of 1024 bytes."""

Act = Callable[[int, WeightLink, list[HeldSlice]], Any]
Rooms = Callable[[int], list[HeldSlice]]


def _bfloat16_rooms(rank: int) -> list[HeldSlice]:
    del rank
    return empty_copy(WEIGHTS, torch.bfloat16)


def _three(
    act: Act, rooms: Rooms = _bfloat16_rooms, *, corrupt: Container[int] = (), **others: Any
) -> list[Any]:
    """What ``act`` does with a trainer (rank 0) and two rollouts.

    Args:
        rooms: what a rollout has room for.
        corrupt: messages that arrive corrupt at the last rollout.
    """

    def run(rank: int, store: Store) -> Any:
        slices = rooms(rank) if rank else cut(make_weights(), (1, 1), rank=0)
        link = open_link(
            store,
            place(rank, 3),
            tensors=receiving(slices) if rank else sending(slices),
            settings=settings(1024, 1024, **others),
            make_group=corrupting(corrupt if rank == 2 else ()),
        )
        return act(rank, link, slices)

    return run_threads(run, 3)


def _message_of_all(results: list[Any]) -> str:
    """All processes ended with the same SyncError."""
    assert [type(result) for result in results] == [SyncError] * 3, results
    messages = {str(result) for result in results}
    assert len(messages) == 1
    return messages.pop()


def _error_of(function: Callable[[], object]) -> SyncError:
    with pytest.raises(SyncError) as caught:
        function()
    return caught.value


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a_storage_that_is_gone_is_named_everywhere_and_the_next_transfer_works(
    mode: dict[str, Any],
) -> None:
    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> SyncError:
        tensor = next(slice_.tensor for slice_ in slices if slice_.spec.name == "head")
        storage, kept = tensor.untyped_storage(), tensor.clone()
        if rank == 0:
            storage.resize_(0)
        error = _error_of(lambda: link.transfer(1))
        assert link.gate.version is None
        if rank == 0:
            storage.resize_(kept.numel() * kept.itemsize)
            tensor.copy_(kept)
        link.transfer(2)
        if rank:
            check_arrived(slices, WEIGHTS)
            assert link.gate.version == 2
        return error

    assert "process 0 (rank 0 of link weights): head: " in _message_of_all(_three(act, **mode))


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_a12_a_corrupt_bucket_is_named_everywhere(mode: dict[str, Any]) -> None:
    in_place = not any(mode.values())

    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> SyncError:
        link.gate.publish(0)
        error = _error_of(lambda: link.transfer(1))
        assert link.gate.version == (None if in_place and rank else 0)
        untouched = all(float(slice_.tensor.min()) == 77 for slice_ in slices[:1])
        assert rank == 0 or untouched != in_place
        link.transfer(2)
        check_arrived(slices if rank else [], WEIGHTS)
        return error

    message = _message_of_all(_three(act, corrupt=[3], **mode))
    assert message.startswith("embed: [30:40, 0:48] arrived corrupt")
    assert "from process 0 (rank 0 of link weights) at process 2 (rank 2 of link" in message


@pytest.mark.parametrize("mode", MODES[1:], ids=str)
def test_a12_weights_that_were_replaced_in_part_cannot_be_used(mode: dict[str, Any]) -> None:
    all_there = threading.Barrier(3)

    def rooms(rank: int) -> list[HeldSlice]:
        slices = _bfloat16_rooms(rank)
        if rank == 1:  # nothing can be copied into a tensor whose elements are one
            last = slices[-1]
            one = torch.zeros((), dtype=torch.bfloat16).expand(last.spec.size)
            slices[-1] = HeldSlice(last.spec, one)
        return slices

    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> int | None:
        link.gate.publish(0)
        link.begin(1)
        link.wait()
        all_there.wait(60)  # else one that is about to end hears of the failure, and fails too
        if rank != 1:
            if rank:
                link.swap(1)
            return link.gate.version
        assert slices[-1].spec.name in str(_error_of(lambda: link.swap(1)))
        assert float(slices[0].tensor.min()) != 77, "the first one was replaced"
        with pytest.raises(SyncError, match="cannot be used: version 1"), link.gate.reading(1):
            pass
        return link.gate.version

    assert _three(act, rooms, **mode)[1:] == [None, 1]


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_later_corruption_is_found_by_samples(mode: dict[str, Any]) -> None:
    """All segments of the first version are checked, then one in so many."""
    first, last = SAMPLING - NUM_MESSAGES - 2, SAMPLING - NUM_MESSAGES + 1

    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> int:
        for version in range(first, last + 1):
            try:
                link.transfer(version)
            except SyncError:
                return version
        return 0

    assert _three(act, corrupt=range(NUM_MESSAGES, 10_000), **mode) == [last] * 3


def test_a_storage_of_another_shape_stops_before_a_byte_moves() -> None:
    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> Any:
        link.transfer(1)
        if rank == 1:
            slices[0] = HeldSlice(slices[0].spec, torch.zeros(3, dtype=torch.bfloat16))
        try:
            link.transfer(2)
        finally:
            assert rank == 0 or link.gate.version == 1

    message = _message_of_all(_three(act))
    assert "process 1 (rank 1 of link weights): embed: its storage is torch.bfloat16 of" in message


def test_a12_processes_that_mean_different_versions_are_told() -> None:
    message = _message_of_all(_three(lambda rank, link, slices: link.transfer(rank)))
    assert "the processes do not transfer the same version" in message


def test_layouts_that_do_not_match_fail_when_the_link_is_formed() -> None:
    def rooms_but(missing: str, extra: str) -> list[HeldSlice]:
        weights = {name: tensor for name, tensor in WEIGHTS.items() if name != missing}
        weights |= {extra: torch.zeros(2)} if extra else {}
        return empty_copy(weights, torch.float32)

    def message(rooms: Rooms) -> str:
        return _message_of_all(_three(lambda *_: None, rooms))

    assert "more: rank 2 needs it and" in message(lambda rank: rooms_but("", "more" * (rank == 2)))
    assert "head: rank 0 holds it and no rank needs it" in message(lambda _: rooms_but("head", ""))
    wide = [held("embed", torch.zeros(9, 9), whole=(9, 9), offset=(0, 0))]
    assert "embed: its shape is (50, 48) in rank 0 and (9, 9) in rank 1" in message(lambda _: wide)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_an_unforeseen_error_frees_the_others_with_its_cause(mode: dict[str, Any]) -> None:
    def fall(number: int, bucket: torch.Tensor) -> None:
        del bucket
        if number == 3:
            raise KeyError("unforeseen")

    def run(rank: int, store: Store) -> None:
        slices = _bfloat16_rooms(rank) if rank else cut(WEIGHTS, (1, 1), rank=0)
        tensors = receiving(slices) if rank else sending(slices)
        make_group = faulty(fall if rank == 1 else lambda *_: None)
        link = open_link(
            store,
            place(rank, 3),
            tensors=tensors,
            settings=settings(256, 256, **mode),
            make_group=make_group,
        )
        link.transfer(1)

    own, *others = sorted(run_threads(run, 3), key=lambda error: not isinstance(error, KeyError))
    assert isinstance(own, KeyError)
    cause = "link weights: process 1 (rank 1): KeyError: 'unforeseen'"
    assert [str(error) for error in others] == [cause] * 2


def test_weights_in_use_end_the_transfer_everywhere() -> None:
    def act(rank: int, link: WeightLink, slices: list[HeldSlice]) -> Any:
        link.transfer(1)
        if rank != 1:
            return link.transfer(2)
        with link.gate.reading(1):
            return link.transfer(2)

    message = _message_of_all(_three(act, timeout_s=10.0))
    assert "process 1 (rank 1 of link weights): weights are in use for longer" in message


def test_a_watcher_can_end_a_link() -> None:
    links: list[WeightLink] = []
    formed = threading.Barrier(3)

    def run(rank: int, store: Store) -> None:
        slices = cut(WEIGHTS, (1, 1), rank=0)
        tensors = receiving(slices) if rank == 1 else sending(slices)
        if rank == 2:
            formed.wait(60)
            report_failure(store, failure_key("weights"), cause="rollout 0 was killed")
            return
        briefly = settings(roll_call_s=0.1)
        link = open_link(store, place(rank, 2), tensors=tensors, settings=briefly)
        links.append(link)  # so that its end of the connection stays
        formed.wait(60)
        if rank == 0:
            started = time.monotonic()
            with pytest.raises(SyncError, match="rollout 0 was killed; no answer from rank 1"):
                link.transfer(1)
            assert time.monotonic() - started < 30
            with pytest.raises(SyncError, match="link weights has ended"):
                link.transfer(1)

    assert run_threads(run, 3) == [None] * 3


def test_a_process_that_never_comes_ends_the_others_in_time() -> None:
    def run(rank: int, store: Store) -> None:
        slices = cut(WEIGHTS, (1, 1), rank=0)
        started = time.monotonic()
        with pytest.raises(SyncError, match="link weights: .* no answer from rank 2"):
            open_link(
                store,
                place(rank, 3),
                tensors=sending(slices),
                settings=settings(timeout_s=1.0, roll_call_s=2.0),
            )
        assert time.monotonic() - started < 30

    assert run_threads(run, 2) == [None, None]


def test_a_background_job_runs_beside_its_owner_and_is_waited_for() -> None:
    background, may_end, done = Background("test"), threading.Event(), list[str]()
    background.join()
    background.check()

    def job() -> None:
        may_end.wait(60)
        done.append("job")

    background.start(job, then=lambda: done.append("then"))
    assert background.is_busy
    assert not done
    with pytest.raises(AssertionError, match="one job at a time"):
        background.start(job, then=job)
    may_end.set()
    background.join()
    assert not background.is_busy
    assert done == ["job", "then"]


def test_the_error_of_a_background_job_is_known_before_then_and_raised_once() -> None:
    background = Background("test")
    seen: list[str] = []

    def fail() -> None:
        raise KeyError("gone")

    def then() -> None:
        try:
            background.check()
        except KeyError as error:
            seen.append(str(error))

    background.start(fail, then=then)
    background.join()
    assert seen == ["'gone'"]
    background.check()
    background.start(fail, then=lambda: None)
    background.join()
    with pytest.raises(KeyError, match="gone"):
        background.check()
    background.check()
