# SPDX-License-Identifier: Apache-2.0
"""Worlds of doubles: compound backends, groups within them, and groups of registered libraries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import Store
from torch.distributed import Backend

from tandem.comm.deadline import Deadline
from tandem.comm.group import GroupPlace, form_group
from tandem.comm.store import connect_store
from tandem.comm.world import WorldPlace, join_world
from tandem.testing.doubles import become, make_backend
from tests.distributed.spawn import HOST, run_ranks
from tests.fakes.patience import LIMIT_S

pytestmark = pytest.mark.usefixtures("doubles")


def _devices_of_one_vendor(rank: int, size: int, store_port: int) -> dict[str, Any]:
    become("musa")
    device = torch.device("musa", rank)
    torch.get_device_module(device).set_device(device)
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    join_world(store, WorldPlace("train", rank, size, device, "mccl", timeout_s=LIMIT_S))
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
    distributed.destroy_process_group()
    join_world(store, WorldPlace("single", rank, size, torch.device("cpu"), "gloo", timeout_s=20))
    told["single"] = distributed.get_backend()
    distributed.destroy_process_group()
    return told | {"totals": totals}


def test_a6_compound_backends_groups_in_them_and_tensors_on_the_host() -> None:
    told = run_ranks(_devices_of_one_vendor, 2, joined=False)
    for one in told:
        assert one["backend"] == one["of a group"] == "cpu:gloo,musa:mccl"
        assert one["totals"] == [9.0] * 4
        assert one["single"] == "gloo"
        assert "AVG" in one["average"], "it does not average; nothing of ours asks it to (A17)"


def _become_with_flagcx(name: str) -> torch.device:
    """Become a double whose torch also has a library that connects vendors."""
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


def _standalone(rank: int, size: int, store_port: int) -> list[int]:
    """Form a group of its own over the vendor's library, and one across vendors."""
    del size
    name = ("musa", "musa", "npu")[rank]
    device = _become_with_flagcx(name)
    store: Store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    received: list[int] = []
    for library, members in (("mccl", (0, 1)), ("flagcx", (0, 1, 2))):
        if rank not in members:
            continue
        group = form_group(store, GroupPlace(library, members, rank, device, LIMIT_S, library))
        x = torch.full((5,), rank, dtype=torch.uint8, device=device)
        group.broadcast(x, root=1).wait(Deadline(LIMIT_S, store=store, key=f"{library}/failure"))
        received.append(int(x.sum()))
        # One that is not yet connected to all would see the end of a connection.
        store.set(f"{library}/done/{rank}", "")
        store.wait([f"{library}/done/{member}" for member in members])
        group.close()
    return received


def test_groups_of_their_own_form_by_any_registered_library() -> None:
    assert run_ranks(_standalone, 3, joined=False) == [[5, 5], [5, 5], [5]]
