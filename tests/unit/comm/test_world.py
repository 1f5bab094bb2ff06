# SPDX-License-Identifier: Apache-2.0
"""Backend strings, and a world of one process."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from tandem.comm.world import WorldPlace, join_world, world_backend

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("device", "library", "backend"),
    [
        ("cpu", "gloo", "gloo"),
        ("cuda", "nccl", "cpu:gloo,cuda:nccl"),
        ("npu", "hccl", "cpu:gloo,npu:hccl"),
        ("musa", "mccl", "cpu:gloo,musa:mccl"),
        ("musa", "flagcx", "cpu:gloo,musa:flagcx"),
    ],
)
def test_a6_tensors_on_the_host_have_a_backend_everywhere(
    device: str, library: str, backend: str
) -> None:
    assert world_backend(device, library) == backend


def test_a_world_is_joined() -> None:
    join_world(HashStore(), WorldPlace("train", 0, 1, CPU, "gloo", timeout_s=5))
    try:
        total = torch.ones(2)
        distributed.all_reduce(total)
        assert (distributed.get_world_size(), total.tolist()) == (1, [1, 1])
        assert distributed.get_backend() == "gloo"
    finally:
        distributed.destroy_process_group()
