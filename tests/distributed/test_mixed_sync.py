# SPDX-License-Identifier: Apache-2.0
"""Weights from a trainer on two doubles of one vendor to rollouts on two of another and on the
host: every parameter arrives bit by bit, crosses once and fans out inside (A8); so by FlagCX (A9).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._distributed_c10d import Store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tandem.comm.deadline import Deadline
from tandem.comm.flagcx import form_flagcx_group
from tandem.comm.flagcx_library import Abi, load_library
from tandem.comm.group import Group, GroupPlace, Pending, form_group
from tandem.comm.store import connect_store
from tandem.comm.world import WorldPlace, join_world
from tandem.platforms.record import CPU, CUDA, Platform
from tandem.testing.doubles import double_platform
from tandem.testing.flagcx_stub import stub_library
from tandem.types import HeldSlice
from tandem.weight_sync.handshake import FlagcxAccess, LinkPlace
from tandem.weight_sync.link import open_link
from tandem.weight_sync.transport_choice import TransportKind
from tandem.workers.linking import stream_handle
from tests.distributed.spawn import HOST, run_ranks
from tests.fakes.patience import LIMIT_S
from tests.unit.weight_sync.layouts import held, receiving, sending, settings

pytestmark = pytest.mark.usefixtures("doubles", "flagcx_stub")

MIB = 1 << 20
FLAGCX_VENDORS = {"npu": "NVIDIA", "musa": "MUSA"}
"""Not Ascend, which FlagCX does not connect with others."""
Name = str


@dataclass(frozen=True)
class Ends:
    """What is linked: the platform of each rank, of which those like the first train; the sizes of
    buckets, each tried with a link of its own; whether weights move from host to host while the
    devices go on; FlagCX's binary interface, where it is there; and the way that is asked for.
    """

    platforms: tuple[str, ...] = ("npu", "npu", "musa", "musa", "cpu")
    buckets: tuple[int, ...] = (MIB,)
    staged: bool = False
    abi: Abi | None = None
    transport: TransportKind | None = None


@dataclass
class Recorder:
    """Makes groups, and notes who took part in each broadcast on them, and with how many bytes."""

    platforms: tuple[str, ...]
    make: Callable[[Store, GroupPlace], Group]
    seen: list[tuple[tuple[str, ...], int]] = field(default_factory=list[Any])

    def __call__(self, store: Store, place: GroupPlace) -> Group:
        return _Recorded(self.make(store, place), self, place)


class _Recorded:
    def __init__(self, group: Group, recorder: Recorder, place: GroupPlace) -> None:
        self.members = group.members
        self._group = group
        self._note = recorder.seen.append
        self._names = tuple(recorder.platforms[member] for member in place.members)
        self._rank = place.rank

    def broadcast(self, tensor: Tensor, *, root: int) -> Pending:
        if root == self._rank:
            self._note((self._names, tensor.numel()))
        return self._group.broadcast(tensor, root=root)

    def gather(self, value: Any, deadline: Deadline) -> list[Any]:
        return self._group.gather(value, deadline)

    def close(self) -> None:
        self._group.close()

    def abandon(self) -> None:
        self._group.abandon()


def _module() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 49), nn.LayerNorm(49), nn.Linear(49, 3))


def _others() -> dict[Name, Tensor]:
    """Tensors besides those of the module; two of them are one."""
    generator = torch.Generator().manual_seed(6)
    large = torch.randn(30_000, 48, generator=generator).bfloat16()
    return {
        "large": large,
        "tied": large,
        "quantized": torch.randint(-128, 128, (37, 11), generator=generator, dtype=torch.int8),
        "empty": torch.empty(0, 5),
        "scalar": torch.tensor(1.5),
    }


def _sharded(device: torch.device) -> list[HeldSlice]:
    """This rank's part of the module under FSDP2, after a step, and its rows of the others."""
    num_ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh(device.type, (num_ranks,))
    module = _module().to(device)
    # As our engine does: not every vendor's library averages.
    fully_shard(module, mesh=mesh).set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(2, 64, device=device)).square().sum().backward()
    optimizer.step()
    slices: list[HeldSlice] = []
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local().detach()
        _, offset = compute_local_shape_and_global_offset(
            parameter.shape, mesh, parameter.placements
        )
        slices.append(held(name, local, whole=parameter.shape, offset=offset))
    for name, whole in _others().items():
        rows = whole.shape[0] if whole.dim() else 0
        first, last = (rows * (mesh.get_rank() + end) // num_ranks for end in (0, 1))
        part = whole[first:last] if rows else whole
        offset = (first, *[0] * (whole.dim() - 1)) if whole.dim() else ()
        slices.append(held(name, part.to(device), whole=whole.shape, offset=offset))
    return slices


def _rooms(device: torch.device) -> list[HeldSlice]:
    wholes = dict(_module().named_parameters()) | _others()
    return [
        held(
            name,
            torch.full(whole.shape, 77, dtype=whole.dtype, device=device),
            whole=whole.shape,
            offset=[0] * whole.dim(),
        )
        for name, whole in wholes.items()
    ]


def _digests(slices: list[HeldSlice]) -> dict[Name, str]:
    """Of whole tensors."""
    return {s.spec.name: _digest(s.tensor) for s in slices}


def _digest(tensor: Tensor) -> str:
    return sha256(
        tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    ).hexdigest()


def _whole_digests(slices: list[HeldSlice], rank: int) -> dict[Name, str]:
    """The same of a trainer's slices, put together on the host."""
    found: dict[Name, str] = {}
    for one in slices:
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (one.spec.offset, one.tensor.cpu()))
        tensors = [part for _, part in parts]
        is_cut = one.spec.size != one.spec.shape
        found[one.spec.name] = _digest(torch.cat(tensors) if is_cut else tensors[rank])
    return found


def _flagcx(platform: Platform, abi: Abi | None) -> FlagcxAccess | None:
    if abi is None or platform is CPU:
        return None
    os.environ["FLAGCX_STUB_VENDOR"] = FLAGCX_VENDORS[platform.name]
    library = load_library(stub_library(abi))
    handle = partial(stream_handle, platform.device_type)
    make_group = partial(form_flagcx_group, library=library, stream_handle=handle)
    return FlagcxAccess(library.vendor(), make_group)


def real_or_double(name: str) -> Platform:
    """The platform of a process, which is there."""
    platform = {"cpu": CPU, "cuda": CUDA}.get(name) or double_platform(name)
    assert platform.is_available()
    return platform


def transfer(rank: int, size: int, store_port: int, ends: Ends) -> dict[str, Any]:
    """What a rank has afterwards, as SHA-256 of all tensors for each link, and who took part in its
    broadcasts."""
    name = ends.platforms[rank]
    platform = real_or_double(name)
    device = torch.device("cpu") if platform is CPU else torch.device(name, rank % 2)
    platform.use_device(rank % 2)
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    num_trainers = ends.platforms.count(ends.platforms[0])
    is_trainer = rank < num_trainers
    if is_trainer:
        world = WorldPlace(
            "train", rank, num_trainers, device, platform.collectives, timeout_s=LIMIT_S
        )
        join_world(store, world)
    slices = _sharded(device) if is_trainer else _rooms(device)
    recorder = Recorder(ends.platforms, form_group)
    digests: list[dict[Name, str]] = []
    for number, bucket_bytes in enumerate(ends.buckets):
        for one in () if is_trainer else slices:
            one.tensor.fill_(99)
        link = open_link(
            store,
            LinkPlace(
                f"weights {number}",
                rank,
                size,
                role=f"{name} {rank}",
                device=device,
                platform=platform,
                device_id=f"{name}:{rank}",
                flagcx=_flagcx(platform, ends.abi),
            ),
            tensors=sending(slices) if is_trainer else receiving(slices),
            settings=settings(
                bucket_bytes,
                bucket_bytes,
                timeout_s=LIMIT_S,
                staged=ends.staged,
                transport=ends.transport,
            ),
            make_group=recorder,
        )
        link.transfer(1)
        link.close()
        digests.append(_whole_digests(slices, rank) if is_trainer else _digests(slices))
    return {"digests": digests, "broadcasts": recorder.seen}


def check(told: list[dict[str, Any]], num_links: int) -> None:
    """Every rank has the same, each time."""
    expected = told[0]["digests"][0]
    assert len(expected) == 6 + 5
    assert expected["large"] == expected["tied"]
    for one in told:
        assert one["digests"] == [expected] * num_links


def test_a8_every_parameter_arrives_and_crosses_to_each_vendor_once() -> None:
    buckets = (MIB, 100_003)
    told = run_ranks(transfer, 5, Ends(buckets=buckets), joined=False)
    check(told, len(buckets))
    num_bytes = sum(p.numel() * 4 for p in _module().parameters())
    num_bytes += sum(t.numel() * t.element_size() for t in _others().values())
    sent: dict[tuple[str, ...], int] = {}
    for one in told:
        for names, size in one["broadcasts"]:
            sent[names] = sent.get(names, 0) + size
    assert sent.keys() == {("npu", "musa"), ("npu", "cpu"), ("musa", "musa")}
    for names, size in sent.items():
        assert num_bytes <= size / len(buckets) < num_bytes * 1.01, names


def test_a8_weights_cross_while_the_devices_go_on() -> None:
    told = run_ranks(transfer, 5, Ends(staged=True), joined=False)
    check(told, 1)
    groups = {names for one in told for names, _ in one["broadcasts"]}
    assert groups == {("npu", "musa"), ("npu", "cpu"), ("musa", "musa")}


@pytest.mark.parametrize("abi", list(Abi))
def test_a9_weights_cross_by_flagcx_where_it_is_asked_for(abi: Abi) -> None:
    vendors = Ends().platforms[:4]
    ends = Ends(vendors, abi=abi, transport=TransportKind.FLAGCX)
    told = run_ranks(transfer, 4, ends, joined=False)
    check(told, 1)
    assert not [one["broadcasts"] for one in told if one["broadcasts"]], "all are FlagCX's"


def test_a9_one_sender_of_its_vendor_goes_through_the_hosts_though_flagcx_is_there() -> None:
    ends = Ends(Ends().platforms[:4], abi=Abi.DEVICE_HANDLE)
    told = run_ranks(transfer, 4, ends, joined=False)
    check(told, 1)
    groups = {names for one in told for names, _ in one["broadcasts"]}
    assert groups == {("npu", "musa"), ("musa", "musa")}


def _lonely(rank: int, size: int, store_port: int) -> str:
    """A receiver of another platform does not come."""
    del size
    if rank == 2:
        return ""
    name = ("npu", "musa", "musa")[rank]
    platform = double_platform(name)
    assert platform.is_available()
    device = torch.device(name, 0)
    slices = [held("w", torch.ones(4, device=device), whole=(4,), offset=(0,))]
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    store.set(f"here {rank}", "")
    store.wait(["here 0", "here 1"])
    with pytest.raises(Exception, match="link lonely: ") as caught:
        open_link(
            store,
            LinkPlace("lonely", rank, 3, f"{name} {rank}", device, platform),
            tensors=receiving(slices) if rank else sending(slices),
            settings=settings(MIB, MIB, timeout_s=2.0, roll_call_s=5.0),
        )
    return str(caught.value)


def test_a12_a_process_of_another_vendor_that_does_not_come_is_named() -> None:
    said = run_ranks(_lonely, 3, joined=False)
    assert said[0] == said[1]
    assert "rank 2" in said[0]
