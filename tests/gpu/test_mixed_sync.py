# SPDX-License-Identifier: Apache-2.0
"""Weights from GPUs to rollouts on doubles of another vendor and on the host, by staging: bit by
bit, and while the GPU goes on training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tandem.comm.store import connect_store
from tandem.platforms.record import CPU
from tandem.weight_sync.handshake import LinkPlace
from tandem.weight_sync.link import open_link
from tests.distributed.spawn import HOST, run_ranks
from tests.distributed.test_mixed_sync import MIB, Ends, check, real_or_double, transfer
from tests.unit.weight_sync.layouts import cut, receiving, sending, settings

logger = logging.getLogger(__name__)

pytestmark = pytest.mark.usefixtures("doubles")

MODEL_MIB = 512 if torch.cuda.is_available() else 16
BUCKET_MIB = MODEL_MIB // 8
VERSIONS = (1, 2, 3)
SIDE = 4096 if torch.cuda.is_available() else 256
"""Of the matrices that the trainer works on."""


def _vendor() -> str:
    return "cuda" if torch.cuda.is_available() else "npu"


def test_weights_of_gpus_reach_another_vendor_and_the_host_bit_by_bit() -> None:
    vendor = _vendor()
    num_trainers = min(2, torch.cuda.device_count()) or 1
    platforms = (*[vendor] * num_trainers, "musa", "musa", "cpu")
    ends = Ends(platforms, buckets=(MIB, 100_003))
    told = run_ranks(transfer, len(platforms), ends, joined=False, timeout_s=200)
    check(told, len(ends.buckets))
    groups = {names for one in told for names, _ in one["broadcasts"]}
    assert groups == {(vendor, "musa"), (vendor, "cpu"), ("musa", "musa")}


def _train_beside(
    rank: int, size: int, store_port: int, platforms: tuple[str, ...]
) -> list[dict[str, Any]]:
    """What the trainer, rank 0, did during each transfer; nothing of a receiver."""
    platform = real_or_double(platforms[rank])
    platform.use_device(0)
    device = torch.device("cpu" if platform is CPU else f"{platforms[rank]}:0")
    weight = torch.zeros(MODEL_MIB, 1 << 18, device=device)
    slices = cut({"w": weight}, (1, 1), rank=0)
    link = open_link(
        connect_store(HOST, store_port, timeout_s=60),
        LinkPlace("weights", rank, size, f"{platforms[rank]} {rank}", device, platform),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(BUCKET_MIB << 20, BUCKET_MIB << 20, timeout_s=60.0, staged=True),
    )
    told: list[dict[str, Any]] = []
    for version in VERSIONS:
        if rank:
            link.begin(version)
            assert link.swap(version) == version
            assert weight.aminmax() == (version, version)
            continue
        weight.fill_(version)
        begin_s = time.perf_counter()
        link.begin(version)
        packed_s = time.perf_counter() - begin_s
        weight.fill_(-version)  # training goes on with them
        waiting = threading.Thread(target=link.wait)
        waiting.start()
        beside_per_s = _rate(device, waiting.is_alive)
        report = link.wait()
        assert report is not None
        told.append(
            {
                "packed_s": packed_s,
                "moved_s": report.duration_s,
                "gb_per_s": weight.nbytes / report.duration_s / 1e9,
                "steps_per_s": beside_per_s,
                "steps_per_s_alone": _rate(device, for_half_a_second()),
            }
        )
    link.close()
    return told


def for_half_a_second() -> Callable[[], bool]:
    """True for so long."""
    end_s = time.perf_counter() + 0.5
    return lambda: time.perf_counter() < end_s


def _rate(device: torch.device, goes_on: Callable[[], bool]) -> float:
    """Pieces of work that the trainer's device does in a second, as long as it ``goes_on``."""
    matrix = torch.full((SIDE, SIDE), 0.5, device=device)
    begin_s, number = time.perf_counter(), 0
    while goes_on():
        assert (matrix @ matrix)[-1, -1].item() == SIDE / 4
        number += 1
    return number / (time.perf_counter() - begin_s)


def test_a_gpu_trains_on_while_its_weights_travel_to_another_vendor_and_the_host() -> None:
    platforms = (_vendor(), "musa", "cpu")
    (told, *_) = run_ranks(_train_beside, 3, platforms, joined=False, timeout_s=200)
    logger.info("%d MiB from %s to %s and %s, by version: %s", MODEL_MIB, *platforms, told)
    if not torch.cuda.is_available():
        return  # a trial shares one host among all of them
    for one in told[1:]:  # the first makes connections, and checks all
        assert one["packed_s"] < one["moved_s"] / 2, "the trainer waits for packing alone"
        assert one["steps_per_s"] > one["steps_per_s_alone"] / 2
