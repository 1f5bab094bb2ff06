# SPDX-License-Identifier: Apache-2.0
"""Checks of collectives among the devices of a platform, and on the host in the same world."""

from __future__ import annotations

import time

import torch
from torch import distributed
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tandem.testing.contracts.check import Bench, Check, Measured, require, require_equal

_BROADCAST_BYTES = 64 * 1024**2


def backend_is_compound(bench: Bench) -> Measured:
    """Check that the world has the vendor's library for the device and gloo for the host."""
    platform = bench.here.platform
    parts = str(distributed.get_backend_config()).split(",")
    wanted = {f"{platform.device_type}:{platform.collectives}", "cpu:gloo"}
    require(wanted <= set(parts), f"the world has {parts}, not {sorted(wanted)}")
    host = torch.ones(2)
    distributed.all_reduce(host)
    require_equal(host, torch.full((2,), float(bench.here.size)), what="a sum on the host")
    return {}


def collectives_are_right(bench: Bench) -> Measured:
    """Check the collectives that training and weight transfers use."""
    if bench.here.size == 1:
        return None
    rank, size, device = bench.here.rank, bench.here.size, bench.device
    ranks = torch.arange(size, dtype=torch.float32)
    total = torch.full((3,), float(rank), device=device)
    distributed.all_reduce(total)
    require_equal(total, ranks.sum().expand(3), what="all_reduce")
    largest = torch.tensor([rank, -rank], device=device)
    distributed.all_reduce(largest, op=ReduceOp.MAX)
    require_equal(largest, torch.tensor([size - 1, 0]), what="all_reduce of the maximum")
    for dtype in (torch.bfloat16, torch.float32, torch.uint8, torch.int64):
        sent = torch.full((5,), rank + 1, device=device).to(dtype)
        distributed.broadcast(sent, src=size - 1)
        require_equal(sent, torch.full((5,), size).to(dtype), what=f"broadcast of {dtype}")
    gathered = [torch.empty(2, device=device) for _ in range(size)]
    distributed.all_gather(gathered, torch.full((2,), float(rank), device=device))
    require_equal(torch.stack(gathered)[:, 0], ranks, what="all_gather")
    exchanged = torch.empty(size, 2, device=device)
    distributed.all_to_all_single(exchanged, torch.full((size, 2), float(rank), device=device))
    require_equal(exchanged[:, 1], ranks, what="all_to_all")
    pending = distributed.broadcast(total, src=0, async_op=True)
    assert pending is not None, "a pending collective can be waited for"
    pending.wait()
    distributed.barrier()
    return {}


def averages_are_sums_divided(bench: Bench) -> Measured:
    """Check means over ranks: by a sum and a division, and by the library if its record says so."""
    rank, size = bench.here.rank, bench.here.size
    if size == 1:
        return None
    mean = torch.tensor([float(rank), 1.0], device=bench.device)
    by_library = mean.clone()
    distributed.all_reduce(mean)
    mean /= size
    require_equal(mean, torch.tensor([(size - 1) / 2, 1.0]), what="a sum, divided")
    if bench.here.platform.averages:
        distributed.all_reduce(by_library, op=ReduceOp.AVG)
        require_equal(by_library, mean.cpu(), what="ReduceOp.AVG")
    return {}


def subgroups_work_alone(bench: Bench) -> Measured:
    """Check that a group of some ranks computes collectives without the others."""
    if bench.here.size == 1:
        return None
    members = list(range((bench.here.size + 1) // 2))
    group = distributed.new_group(members)
    if bench.here.rank in members:
        total = torch.ones(1, device=bench.device)
        distributed.all_reduce(total, group=group)
        require(total.item() == len(members), "a sum within a group is wrong")
    distributed.barrier()
    return {}


def sharded_weights_come_together(bench: Bench) -> Measured:
    """Check that FSDP2 shards weights over the devices and gathers them again."""
    torch.manual_seed(0)
    net = torch.nn.Linear(33, 17).to(bench.device)
    whole = net.weight.detach().cpu().clone()
    unit = fully_shard(net, mesh=init_device_mesh(bench.device.type, (bench.here.size,)))
    unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    assert isinstance(net.weight, DTensor), "a sharded weight is a DTensor"
    require(net.weight.to_local().device == bench.device, "a shard is elsewhere")
    require_equal(net.weight.full_tensor(), whole, what="a sharded weight")
    net(torch.ones(2, 33, device=bench.device)).sum().backward()
    assert isinstance(net.weight.grad, DTensor), "a sharded gradient is a DTensor"
    expected = torch.full((17, 33), 2.0 * bench.here.size)
    require_equal(net.weight.grad.full_tensor(), expected, what="a sharded gradient")
    return {}


def broadcast_is_measured(bench: Bench) -> Measured:
    """Measure the rate at which bytes reach the other devices."""
    if bench.here.size == 1:
        return None
    data = torch.full((_BROADCAST_BYTES,), bench.here.rank, dtype=torch.uint8, device=bench.device)
    distributed.broadcast(data, src=0)
    _synchronize(bench)
    start = time.perf_counter()
    distributed.broadcast(data, src=0)
    _synchronize(bench)
    seconds = time.perf_counter() - start
    require(not data.any(), "the bytes of rank 0 are zeros")
    return {"broadcast_gb_s": _BROADCAST_BYTES / 1e9 / seconds}


def _synchronize(bench: Bench) -> None:
    if not bench.is_host:
        torch.accelerator.synchronize(bench.device)


CHECKS = (
    Check("world/backend", backend_is_compound),
    Check("world/collectives", collectives_are_right),
    Check("world/averages", averages_are_sums_divided),
    Check("world/subgroups", subgroups_work_alone),
    Check("world/sharding", sharded_weights_come_together),
    Check("world/broadcast", broadcast_is_measured),
)
