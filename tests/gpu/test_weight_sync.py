# SPDX-License-Identifier: Apache-2.0
"""Weights between processes with GPUs: one that they share, and one each."""

from __future__ import annotations

import gc
import os
import re
import signal
import time
from typing import Any

import pytest
import torch

from tandem.comm.store import connect_store
from tandem.platforms.capture import cuda_graphs
from tandem.platforms.registry import platform_named
from tandem.types import HeldSlice
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import LinkPlace
from tandem.weight_sync.link import WeightLink, open_link
from tandem.weight_sync.transport_choice import TransportKind
from tests.distributed.spawn import HOST, run_ranks
from tests.unit.weight_sync.faulty_group import faulty
from tests.unit.weight_sync.layouts import (
    MODES,
    check_arrived,
    cut,
    empty_copy,
    make_weights,
    receiving,
    sending,
    settings,
)

TIMEOUT_S = 15.0
NUM_MESSAGES = 6
"""Of a transfer to a rollout in bf16, by buckets of 1024 bytes."""


def _device(rank: int, *, shared: bool) -> torch.device:
    """On a trial there is only a CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", 0 if shared else rank)


def _on(device: torch.device, slices: list[HeldSlice]) -> list[HeldSlice]:
    return [HeldSlice(slice_.spec, slice_.tensor.to(device)) for slice_ in slices]


def _open(
    rank: int, store_port: int, *, device: torch.device, name: str, **others: Any
) -> tuple[WeightLink, list[HeldSlice]]:
    """A trainer's or a rollout's end of a link, and its slices."""
    weights = make_weights()
    slices = _on(
        device, empty_copy(weights, torch.bfloat16) if rank else cut(weights, (1, 1), rank=0)
    )
    options = {"transport": others.pop("transport", None), "timeout_s": TIMEOUT_S}
    link = open_link(
        connect_store(HOST, store_port, timeout_s=30),
        LinkPlace(name, rank, 2, f"process {rank}", device, platform_named(device.type)),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(1024, 1024, **options),
        **others,
    )
    return link, slices


def _transfer_twice(
    rank: int, size: int, store_port: int, kinds: list[TransportKind | None], shared: bool
) -> None:
    del size
    for kind in kinds:
        device = _device(rank, shared=shared)
        link, slices = _open(rank, store_port, device=device, name=f"{kind}", transport=kind)
        for version in (1, 2):
            if rank == 0:
                for slice_ in slices:
                    slice_.tensor.mul_(version)
            link.transfer(version)
        expected = {name: 2 * tensor for name, tensor in make_weights().items()}
        arrived = _on(torch.device("cpu"), slices)
        check_arrived(arrived if rank else [], expected)
        link.close()


def test_weights_reach_a_process_on_the_same_gpu() -> None:
    kinds = (
        [None, TransportKind.STAGED, TransportKind.IPC]
        if torch.cuda.is_available()
        else [None, TransportKind.STAGED]
    )
    assert run_ranks(_transfer_twice, 2, kinds, True, joined=False, timeout_s=120) == [None] * 2


def test_weights_reach_a_process_on_another_gpu() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    kinds = [TransportKind.COLLECTIVE, TransportKind.STAGED]
    assert run_ranks(_transfer_twice, 2, kinds, False, joined=False, timeout_s=120) == [None] * 2


def _lose_the_rollout(rank: int, size: int, store_port: int) -> tuple[str, float]:
    """Its process is a child that is killed within a transfer, and replaced by its parent."""
    del size
    if rank == 1:
        child = os.fork()
        if not child:
            _vanish(store_port)
        os.waitpid(child, 0)
        connect_store(HOST, store_port, timeout_s=60).wait(["replace"])
        link, slices = _open(rank, store_port, device=_device(1, shared=False), name="lost again")
        link.transfer(3)
        check_arrived(_on(torch.device("cpu"), slices), make_weights())
        return "", 0.0
    link, _ = _open(rank, store_port, device=_device(0, shared=False), name="lost")
    link.transfer(1)
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        link.transfer(2)
    duration_s = time.monotonic() - started
    connect_store(HOST, store_port, timeout_s=30).set("replace", "")
    successor, _ = _open(rank, store_port, device=_device(0, shared=False), name="lost again")
    successor.transfer(3)
    return str(caught.value), duration_s


def _vanish(store_port: int) -> None:
    def act(number: int, bucket: torch.Tensor) -> None:
        del bucket
        if number == NUM_MESSAGES + 3:
            os.kill(os.getpid(), signal.SIGKILL)

    link, _ = _open(
        1, store_port, device=_device(1, shared=False), name="lost", make_group=faulty(act)
    )
    link.transfer(1)
    link.transfer(2)


def test_a_lost_process_ends_a_collective_in_time_and_can_be_replaced() -> None:
    if torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs")
    (error, duration_s), _ = run_ranks(_lose_the_rollout, 2, joined=False, timeout_s=120)
    assert re.search(r"no answer from rank 1", error)
    assert duration_s < TIMEOUT_S + 5


MODEL_MIB, BUCKET_MIB = 64, 4
CHECKSUM_MIB = 16
"""While a bucket of that size is summed up: two int64 tensors."""


def _update_beside(rank: int, size: int, store_port: int) -> list[int]:
    """Two versions in each mode, while the rollout captures and replays what reads them.

    Returns:
        by mode, MiB that a transfer took of this GPU beside the weights.
    """
    del size
    taken: list[int] = []
    for mode in MODES:
        taken.append(_update_twice(rank, store_port, mode))
        gc.collect()  # a link is garbage in a cycle, and holds its weights
    return taken


def _update_twice(rank: int, store_port: int, mode: dict[str, Any]) -> int:
    device = _device(rank, shared=False)
    torch.cuda.set_device(device)
    weight = torch.zeros(MODEL_MIB, 1 << 18, device=device)
    slices = cut({"w": weight}, (1, 1), rank=0)
    link = open_link(
        connect_store(HOST, store_port, timeout_s=30),
        LinkPlace(f"{mode}", rank, 2, f"process {rank}", device, platform_named(device.type)),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(BUCKET_MIB << 20, BUCKET_MIB << 20, timeout_s=TIMEOUT_S, **mode),
    )
    link.gate.publish(0)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for version in (1, 2):
        if rank == 0:
            weight.fill_(version)
        link.begin(version)
        if rank == 0:
            weight.fill_(-version)
        else:
            _generate_until(link, weight, version)
    link.wait()
    taken = (torch.cuda.max_memory_allocated() - before) >> 20
    link.close()
    return taken


def _generate_until(link: WeightLink, weight: torch.Tensor, version: int) -> None:
    capture, extremes = cuda_graphs(), torch.zeros(2, device=weight.device)

    def read() -> None:
        extremes.copy_(torch.stack(weight.aminmax()))

    in_use = link.gate.version
    while in_use != version:
        replay = capture(read)
        with link.gate.reading(TIMEOUT_S) as known:
            replay()
            assert extremes.tolist() == [known, known]
        in_use = link.swap()
    read()
    assert extremes.tolist() == [version, version]


def test_20_a_rollout_captures_and_replays_while_weights_arrive() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    trainer, rollout = run_ranks(_update_beside, 2, joined=False, timeout_s=180)
    assert max(trainer) <= 2 * BUCKET_MIB + CHECKSUM_MIB, "never more than two buckets"
    in_place, second, host, hosts = rollout
    around_mib = 2 * BUCKET_MIB + CHECKSUM_MIB + 3 * 4  # and three captured graphs
    assert max(in_place, host, hosts) <= around_mib < MODEL_MIB
    assert MODEL_MIB <= second <= MODEL_MIB + around_mib
