# SPDX-License-Identifier: Apache-2.0
"""Backends by type of device, and a world of one process."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from tandem.comm.world import join_world, leave_world, world_backend


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl")])
def test_tensors_on_the_host_have_a_backend_everywhere(device: str, backend: str) -> None:
    assert world_backend(device) == backend


@pytest.mark.parametrize("peers_alive", [True, False])
def test_a_world_is_joined_and_left(peers_alive: bool) -> None:
    store = HashStore()
    join_world(store, "train", rank=0, size=1, device=torch.device("cpu"), timeout_s=5)
    total = torch.ones(2)
    distributed.all_reduce(total)
    assert (distributed.get_world_size(), total.tolist()) == (1, [1, 1])
    leave_world(peers_alive=peers_alive)
    assert not distributed.is_initialized()
    leave_world()
