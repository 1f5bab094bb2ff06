# SPDX-License-Identifier: Apache-2.0
"""Worlds of doubles: compound backends, groups within them, and one world of several vendors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import Backend

from tandem.comm.deadline import Deadline, GroupError
from tandem.comm.group import GroupPlace, form_group
from tandem.comm.store import connect_store
from tandem.comm.world import (
    WorldPlace,
    join_mixed_world,
    join_world,
    leave_world,
    mixed_backend,
)
from tandem.errors import UserError
from tandem.testing.doubles import become, make_backend
from tests.distributed.spawn import HOST, run_ranks

pytestmark = pytest.mark.usefixtures("doubles")

VENDORS = ("musa", "npu", "cpu")
SIZE = 1000


def _devices_of_one_vendor(rank: int, size: int, store_port: int) -> dict[str, Any]:
    become("musa")
    device = torch.device("musa", rank)
    torch.get_device_module(device).set_device(device)
    store = connect_store(HOST, store_port, timeout_s=30)
    join_world(store, WorldPlace("train", rank, size, device, "mccl", timeout_s=20))
    group = distributed.new_group([0, 1])
    assert isinstance(group, distributed.ProcessGroup)
    totals: list[float] = []
    for where, peers in ((device, None), ("cpu", None), (device, group), ("cpu", group)):
        x = torch.full((3,), rank + 1.0, device=where)
        distributed.all_reduce(x, group=peers)
        totals.append(x.sum().item())
    told: dict[str, Any] = {
        "backend": distributed.get_backend(),
        "of a group": distributed.get_backend(group),
    }
    try:
        distributed.all_reduce(torch.ones(2, device=device), op=distributed.ReduceOp.AVG)
    except RuntimeError as error:
        told["average"] = str(error).splitlines()[0]
    leave_world()
    join_world(store, WorldPlace("single", rank, size, torch.device("cpu"), "gloo", timeout_s=20))
    told["single"] = distributed.get_backend()
    leave_world()
    return told | {"totals": totals}


def test_a6_compound_backends_groups_in_them_and_tensors_on_the_host() -> None:
    told = run_ranks(_devices_of_one_vendor, 2, joined=False)
    for one in told:
        assert one["backend"] == one["of a group"] == "cpu:gloo,musa:mccl"
        assert one["totals"] == [9.0] * 4
        assert one["single"] == "gloo"
        assert "AVG" in one["average"], "it does not average; nothing of ours asks it to (A17)"


def _weights(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(SIZE, 7)


def _one_world(rank: int, size: int, store_port: int) -> dict[str, Any]:
    name = VENDORS[rank]
    stock_init = PrefixStore.__init__
    store = connect_store(HOST, store_port, timeout_s=30)
    device = torch.device(name) if name == "cpu" else _become_with_flagcx(name)
    refused = ""
    stock_library = "gloo" if name == "cpu" else "flagcx"
    try:
        join_mixed_world(store, WorldPlace("stock", rank, size, device, stock_library, timeout_s=3))
    except GroupError as error:
        refused = str(error)
    leave_world(peers_alive=False)
    library = "gloo" if name == "cpu" else mixed_backend("flagcx", name)
    world = WorldPlace("mixed", rank, size, device, library, timeout_s=20)
    group = join_mixed_world(store, world)
    module = _weights(rank).to(device)
    for parameter in module.parameters():
        if group is not None:
            distributed.broadcast(parameter.data, 0, group=group)
        on_host = parameter.data.cpu()  # from the devices to who has none
        distributed.broadcast(on_host, 0)
        parameter.data.copy_(on_host)
    x = torch.ones(3)
    distributed.all_reduce(x)
    peers = 0.0
    if group is not None:
        y = torch.ones(3)
        distributed.all_reduce(y, group=group)
        peers = y.sum().item()
    expected = list(_weights(0).parameters())
    leave_world()
    return {
        "refused": refused,
        "equal": list(map(torch.equal, (p.cpu() for p in module.parameters()), expected)),
        "all": x.sum().item(),
        "devices": peers,
        "unpatched": PrefixStore.__init__ is stock_init,
    }


def _become_with_flagcx(name: str) -> torch.device:
    """A double whose torch also has a library that connects vendors."""
    become(name)

    def create(options: Any, _: object = None) -> Any:
        return make_backend(
            options.store,
            rank=options.group_rank,
            size=options.group_size,
            timeout=options.timeout,
        )

    Backend.register_backend("flagcx", create, extended_api=True, devices=[name])
    device = torch.device(name, 0)
    torch.get_device_module(device).set_device(device)
    return device


def test_a7_one_world_of_two_vendors_and_the_host() -> None:
    musa, npu, host = run_ranks(_one_world, 3, joined=False)
    for refused in (musa["refused"], npu["refused"]):
        assert refused.startswith(
            "world stock: its devices were not connected within 3 s: "
            "rank 0 has cpu:gloo,musa:flagcx, rank 1 has cpu:gloo,npu:flagcx. "
        )
    assert host["refused"] == ""
    for one in (musa, npu, host):
        assert one["equal"] == [True, True]
        assert one["all"] == 9.0
        assert one["unpatched"]
    assert (musa["devices"], npu["devices"], host["devices"]) == (6.0, 6.0, 0.0)


def _interleaved(rank: int, size: int, store_port: int) -> str:
    name = ("musa", "npu", "musa")[rank]
    device = _become_with_flagcx(name)
    store = connect_store(HOST, store_port, timeout_s=30)
    place = WorldPlace(
        "interleaved", rank, size, device, mixed_backend("flagcx", name), timeout_s=10
    )
    with pytest.raises(UserError) as caught:
        join_mixed_world(store, place)
    return str(caught.value)


def test_a11_an_interleaved_world_is_refused() -> None:
    refusals = run_ranks(_interleaved, 3, joined=False)
    assert set(refusals) == {
        "ranks=musa,npu,musa: those of musa must follow each other. Order them as musa,musa,npu."
    }


def _standalone(rank: int, size: int, store_port: int) -> list[int]:
    """A group of its own over the vendor's library, and one across vendors."""
    del size
    name = ("musa", "musa", "npu")[rank]
    device = _become_with_flagcx(name)
    store: Store = connect_store(HOST, store_port, timeout_s=30)
    received: list[int] = []
    for library, members in (("mccl", (0, 1)), ("flagcx", (0, 1, 2))):
        if rank not in members:
            continue
        group = form_group(store, GroupPlace(library, members, rank, device, 20, library))
        x = torch.full((5,), rank, dtype=torch.uint8, device=device)
        group.broadcast(x, root=1).wait(Deadline(20, store=store, key=f"{library}/failure"))
        received.append(int(x.sum()))
        group.close()
    return received


def test_groups_of_their_own_form_by_any_registered_library() -> None:
    assert run_ranks(_standalone, 3, joined=False) == [[5, 5], [5, 5], [5]]
