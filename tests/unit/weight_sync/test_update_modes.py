# SPDX-License-Identifier: Apache-2.0
"""Links on which versions arrive in copies; the processes are threads. Numbers are those of the
acceptance tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.utils._python_dispatch import TorchDispatchMode

from tandem.types import HeldSlice
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.link import WeightLink, open_link
from tests.unit.weight_sync.faulty_group import Fault, faulty
from tests.unit.weight_sync.layouts import MODES, cut, held, place, receiving, sending, settings
from tests.unit.weight_sync.threads import run_threads

BESIDE = MODES[1:]
STAGED = MODES[2:]
NUM_MESSAGES = 16
"""Of 256 bytes, in a transfer of ``_weights``."""


def _weights(version: int = 0) -> dict[str, Tensor]:
    """4096 bytes, all of them of one version."""
    return {"w": torch.full((64, 16), float(version))}


def _link(
    rank: int,
    store: Store,
    slices: list[HeldSlice],
    *,
    mode: dict[str, Any],
    fault: Fault = lambda number, data: None,
    size: int = 2,
) -> WeightLink:
    """A trainer's (rank 0) or a rollout's, of versions from 0 on."""
    link = open_link(
        store,
        place(rank, size),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(256, 256, **mode),
        make_group=faulty(fault),
    )
    link.gate.publish(0)
    return link


def _versions(slices: list[HeldSlice]) -> set[float]:
    return {float(value) for slice_ in slices for value in slice_.tensor.unique()}


def _pair(
    send: Callable[[WeightLink, list[HeldSlice]], Any],
    receive: Callable[[WeightLink, list[HeldSlice]], Any],
    mode: dict[str, Any],
    *,
    fault: Fault = lambda number, data: None,
) -> list[Any]:
    """What a trainer and a rollout return; ``fault`` happens to what the rollout receives."""

    def run(rank: int, store: Store) -> Any:
        slices = cut(_weights(), (1, 1), rank=0)
        own = fault if rank else lambda number, data: None
        link = _link(rank, store, slices, mode=mode, fault=own)
        result = (receive if rank else send)(link, slices)
        link.close()
        return result

    results = run_threads(run, 2)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def _sends(*versions: int) -> Callable[[WeightLink, list[HeldSlice]], None]:
    def send(link: WeightLink, slices: list[HeldSlice]) -> None:
        for version in versions:
            slices[0].tensor.fill_(version)
            link.begin(version)
            slices[0].tensor.fill_(-version)
        link.wait()

    return send


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_17_what_was_never_put_in_use_is_skipped_and_nothing_is_loaded_twice(
    mode: dict[str, Any],
) -> None:
    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        for version in (1, 2):
            link.begin(version)
            link.wait()
            assert link.gate.version == 0
        loads = link.num_loads
        assert link.swap() == 2
        assert _versions(slices) == {2.0}
        assert link.num_loads - loads == (NUM_MESSAGES if mode["staged"] else 0), "one version"
        loads = link.num_loads
        slices[0].tensor.fill_(77)
        assert link.swap() == link.swap(1) == link.swap(2) == 2
        assert _versions(slices) == {77.0}, "nothing is loaded when nothing is new"
        assert link.num_loads == loads
        link.begin(3)
        assert link.swap(3) == 3
        assert _versions(slices) == {3.0}

    _pair(_sends(1, 2, 3), receive, mode)


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_17_a_version_in_half_is_never_put_in_use(mode: dict[str, Any]) -> None:
    """Version 2 stands still after some of its messages; version 1 waits to be put in use."""
    half, go_on = threading.Event(), threading.Event()

    def hold(number: int, data: Tensor) -> None:
        del data
        if number == NUM_MESSAGES + NUM_MESSAGES // 2:
            half.set()
            assert go_on.wait(60)

    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        link.begin(1)
        link.wait()
        link.begin(2)
        assert half.wait(60)
        kept = 1 if mode["staged"] and mode["double_buffered"] else 0
        assert link.swap() == kept, "with a second copy on the host version 1 is still there"
        assert _versions(slices) == {float(kept)}
        go_on.set()
        assert link.swap(2) == 2
        assert _versions(slices) == {2.0}

    _pair(_sends(1, 2), receive, mode, fault=hold)


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_20_weights_are_read_while_the_next_ones_arrive(mode: dict[str, Any]) -> None:
    """A transfer that stands still: both sides go on, the trainer if it has staged its weights."""
    is_coming, go_on, trained = threading.Event(), threading.Event(), threading.Event()

    def hold(number: int, data: Tensor) -> None:
        del data
        if number == 3:
            is_coming.set()
            assert go_on.wait(60)

    def send(link: WeightLink, slices: list[HeldSlice]) -> None:
        slices[0].tensor.fill_(1)
        link.begin(1)
        slices[0].tensor.fill_(-1)
        went_on = go_on.is_set()
        trained.set()
        assert mode["staged"] != went_on, "it waits for what is not staged, and only for it"
        link.wait()

    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        link.begin(1)
        assert is_coming.wait(60)
        for _ in range(100):
            with link.gate.reading(1) as version:
                assert version == 0
                assert _versions(slices) == {0.0}
            assert link.swap() == 0
        assert trained.wait(5 if mode["staged"] else 0.05) == mode["staged"]
        go_on.set()
        assert link.swap(1) == 1
        assert _versions(slices) == {1.0}

    _pair(send, receive, mode, fault=hold)


class _Allocations(TorchDispatchMode):
    """Counts the bytes of the buffers that this thread makes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.empty.memory_format and result.dtype == torch.uint8:
            self.num_bytes += result.nbytes
        return result


@pytest.mark.parametrize("mode", STAGED, ids=str)
def test_20_a_sender_has_one_copy_and_two_buckets_a_receiver_one_or_two_copies(
    mode: dict[str, Any],
) -> None:
    model, two_buckets = 4096, 512

    def count(function: Callable[[], object]) -> int:
        with _Allocations() as allocations:
            function()
        return allocations.num_bytes

    def send(link: WeightLink, slices: list[HeldSlice]) -> None:
        del slices
        assert count(lambda: link.begin(1)) == model + two_buckets
        link.wait()
        assert count(lambda: link.begin(2)) == two_buckets
        link.wait()

    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        del slices
        num_copies = 2 if mode["double_buffered"] else 1
        assert count(lambda: link.begin(1)) == num_copies * model
        assert count(lambda: link.swap(1)) == two_buckets
        assert count(lambda: link.begin(2)) == 0
        assert count(lambda: link.swap(2)) == two_buckets

    _pair(send, receive, mode)


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_weights_in_use_can_be_replaced_later(mode: dict[str, Any]) -> None:
    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        link.begin(1)
        link.wait()
        link._settings = replace(link._settings, timeout_s=0.4)
        with (
            link.gate.reading(1) as version,
            pytest.raises(SyncError, match=r"in use for longer than 0\.4 s"),
        ):
            assert version == 0
            link.swap()
        assert link.gate.version == 0
        assert link.swap() == 1
        assert _versions(slices) == {1.0}

    _pair(_sends(1), receive, mode)


def test_a_version_that_nobody_sends_is_not_waited_for() -> None:
    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        del slices
        assert link.swap(0) == 0
        with pytest.raises(SyncError, match="version 1 is not coming: 0 is in use"):
            link.swap(1)
        link.begin(1)
        with pytest.raises(SyncError, match="version 2 is not coming: 1 is in use"):
            link.swap(2)

    _pair(_sends(1), receive, STAGED[0])


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_21_a_load_failure_of_one_receiver_ends_the_link_everywhere(mode: dict[str, Any]) -> None:
    def run(rank: int, store: Store) -> str:
        slices = cut(_weights(), (1, 1), rank=0)
        if rank == 1:  # nothing can be copied into a tensor whose elements are one
            slices = [held("w", torch.zeros(()).expand(64, 16), whole=(64, 16), offset=(0, 0))]
        link = _link(rank, store, slices, mode={**mode, "roll_call_s": 60.0}, size=3)
        link.begin(1)
        link.wait()
        with pytest.raises(SyncError) as caught:
            for version in (2, 3):
                link.swap()
                link.begin(version)
                link.wait()
        assert rank != 1 or link.gate.version is None, "what is there now is of no version"
        return str(caught.value)

    trainer, broken, other = run_threads(run, 3)
    assert broken.startswith("version 1: process 1: w: it cannot be copied")
    assert trainer == other
    assert trainer.startswith("link weights: process 1 (rank 1): version 1: w: it cannot be copied")


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_21_a_failure_behind_the_callers_back_is_told_by_the_next_call(
    mode: dict[str, Any],
) -> None:
    """Nobody goes on with old weights in the belief that they are new."""

    def corrupt(number: int, data: Tensor) -> None:
        if number == 3:
            data[0] ^= 1

    calls: list[Callable[[WeightLink], object]] = [
        lambda link: link.swap(1),
        lambda link: link.begin(2),
        lambda link: link.check(),
    ]
    for call in calls:
        ended = threading.Event()

        def send(link: WeightLink, slices: list[HeldSlice], ended: Any = ended) -> str:
            with pytest.raises(SyncError) as caught:
                _sends(1)(link, slices)
            ended.set()
            return str(caught.value)

        def receive(
            link: WeightLink, slices: list[HeldSlice], ended: Any = ended, call: Any = call
        ) -> str:
            link.begin(1)
            assert ended.wait(60)
            link._background.join()
            with pytest.raises(SyncError) as caught:
                call(link)
            assert link.gate.version == 0
            assert _versions(slices) == {0.0}
            return str(caught.value)

        sender, receiver = _pair(send, receive, mode, fault=corrupt)
        assert sender == receiver
        assert "w: [12:16, 0:16] arrived corrupt, from process 0" in receiver


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_21_who_waits_for_a_version_is_told_why_it_does_not_come(mode: dict[str, Any]) -> None:
    waits = threading.Event()

    def corrupt(number: int, data: Tensor) -> None:
        if number == 3:
            assert waits.wait(60)
            time.sleep(0.02)
            data[0] ^= 1

    def send(link: WeightLink, slices: list[HeldSlice]) -> None:
        with pytest.raises(SyncError, match="arrived corrupt"):
            _sends(1)(link, slices)

    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        link.begin(1)
        waits.set()
        with pytest.raises(SyncError, match="arrived corrupt"):
            link.swap(1)
        assert _versions(slices) == {0.0}

    _pair(send, receive, mode, fault=corrupt)


@pytest.mark.parametrize("mode", BESIDE, ids=str)
def test_a_member_that_leaves_during_a_transfer_does_so_at_once_and_frees_the_others(
    mode: dict[str, Any],
) -> None:
    formed, left = threading.Event(), threading.Event()

    def receive(link: WeightLink, slices: list[HeldSlice]) -> None:
        del slices
        assert formed.wait(60)
        link.begin(1)
        started = time.monotonic()
        link.close()
        link.close()
        assert time.monotonic() - started < 30, "the trainer has not even begun"
        left.set()

    def send(link: WeightLink, slices: list[HeldSlice]) -> None:
        formed.set()
        assert left.wait(60)
        with pytest.raises(SyncError, match=r"process 1 \(rank 1\) left during a transfer"):
            _sends(1)(link, slices)

    _pair(send, receive, {**mode, "roll_call_s": 0.05})
