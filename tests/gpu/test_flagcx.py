# SPDX-License-Identifier: Apache-2.0
"""FlagCX's groups on real streams, with the stub as the library: what runs before what (A9)."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from tandem.comm.deadline import Deadline
from tandem.comm.flagcx import form_flagcx_group
from tandem.comm.flagcx_library import Abi, load_library
from tandem.comm.group import GroupPlace
from tandem.comm.store import connect_store
from tandem.testing.flagcx_stub import counters, stub_library
from tests.distributed.spawn import HOST, run_ranks

pytestmark = pytest.mark.usefixtures("flagcx_stub")

NUM_ROUNDS = 5
NUM_BYTES = 3_000_001
SLEEP_CYCLES = 200_000_000
"""About a tenth of a second."""


def _raw(stream: Any) -> int:
    return stream.cuda_stream


def _broadcast(rank: int, size: int, port: int) -> tuple[list[list[int]], tuple[int, int]]:
    """What the bucket held in each round, for what was queued after the wait."""
    has_gpu = torch.cuda.is_available()
    index = rank % max(1, torch.cuda.device_count())
    device = torch.device("cuda", index) if has_gpu else torch.device("cpu")
    if has_gpu:
        os.environ["FLAGCX_STUB_CUDA"] = "1"
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
    store = connect_store(HOST, port, timeout_s=30)
    path = stub_library(Abi.DEVICE_HANDLE)
    group = form_flagcx_group(
        store,
        GroupPlace("weights", tuple(range(size)), rank, device, 30),
        library=load_library(path),
        stream_handle=_raw,
    )
    bucket = torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)
    seen: list[torch.Tensor] = []
    for number in range(1, NUM_ROUNDS + 1):
        if has_gpu:
            torch.cuda._sleep(SLEEP_CYCLES)
        bucket.fill_(number if rank == 0 else 100)
        group.broadcast(bucket, root=0).wait(Deadline(30, store=store, key="failure"))
        seen.append(torch.stack((bucket.min(), bucket.max())))
        bucket.fill_(200)
    values = [extremes.tolist() for extremes in seen]
    group.close()
    return values, counters(path)


def test_a9_a_broadcast_comes_after_what_was_queued_and_before_what_follows() -> None:
    answers = run_ranks(_broadcast, 2, joined=False, timeout_s=120)
    num_streams = int(torch.cuda.is_available())
    expected = [[number, number] for number in range(1, NUM_ROUNDS + 1)]
    assert answers == [(expected, (num_streams, num_streams))] * 2
