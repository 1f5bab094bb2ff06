# SPDX-License-Identifier: Apache-2.0
"""Backend strings, a world of one process, and the order of vendors (A6, A11 of the platform
research; worlds of several vendors are in tests/distributed)."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from tandem.comm.deadline import GroupError
from tandem.comm.order import require_contiguous, vendor_order
from tandem.comm.world import WorldPlace, join_world, leave_world, mixed_backend, world_backend
from tandem.errors import UserError

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


@pytest.mark.parametrize("peers_alive", [True, False])
def test_a_world_is_joined_and_left(peers_alive: bool) -> None:
    join_world(HashStore(), WorldPlace("train", 0, 1, CPU, "gloo", timeout_s=5))
    total = torch.ones(2)
    distributed.all_reduce(total)
    assert (distributed.get_world_size(), total.tolist()) == (1, [1, 1])
    assert distributed.get_backend() == "gloo"
    leave_world(peers_alive=peers_alive)
    assert not distributed.is_initialized()
    leave_world()


def test_a_library_that_is_not_loaded_is_named() -> None:
    with pytest.raises(GroupError, match=r"torch\.distributed has no xyzccl in this process"):
        mixed_backend("xyzccl", "xyz")


def test_a11_vendors_are_sorted_and_interleaving_is_rejected() -> None:
    vendors = ["npu", "musa", "npu", "cpu", "musa"]
    order = vendor_order(vendors)
    assert order == [0, 2, 1, 4, 3]
    require_contiguous([vendors[rank] for rank in order])
    require_contiguous([])
    with pytest.raises(UserError) as caught:
        require_contiguous(vendors)
    assert str(caught.value) == (
        "ranks=npu,musa,npu,cpu,musa: those of npu must follow each other. "
        "Order them as npu,npu,musa,musa,cpu."
    )
