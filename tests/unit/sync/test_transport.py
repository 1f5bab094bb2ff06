# SPDX-License-Identifier: Apache-2.0
"""Which way bytes take, and why."""

from __future__ import annotations

import pytest
import torch

from tandem.sync.failure import SyncError
from tandem.sync.transport import Endpoint, Way, choose_way, endpoint_of

CPU = Endpoint("cpu", "")
GPUS = [Endpoint("cuda", f"GPU-{n}") for n in range(3)]
OTHER = [Endpoint("npu", "1")] * 2


@pytest.mark.parametrize(
    ("endpoints", "way", "reason"),
    [
        ([CPU, CPU, CPU], Way.COLLECTIVE, "all tensors lie in host memory"),
        (GPUS, Way.COLLECTIVE, "each process has a cuda device"),
        ([GPUS[0], GPUS[0]], Way.IPC, "the processes share a cuda device"),
        ([GPUS[0], CPU], Way.STAGED, "tensors lie on cpu and cuda"),
        ([GPUS[0], GPUS[0], GPUS[1]], Way.STAGED, "tensors lie on cuda"),
        (OTHER, Way.STAGED, "tensors lie on npu"),
    ],
)
def test_the_fastest_way_there_is(endpoints: list[Endpoint], way: Way, reason: str) -> None:
    choice = choose_way(endpoints)
    assert (choice.way, choice.reason) == (way, reason)


def test_a_wanted_way_is_taken_or_refused() -> None:
    assert choose_way(GPUS, Way.STAGED).way is Way.STAGED
    with pytest.raises(SyncError, match="ipc does not exist .* only collective, staged"):
        choose_way(GPUS, Way.IPC)


def test_the_endpoint_of_a_cpu() -> None:
    assert endpoint_of(torch.device("cpu")) == CPU
