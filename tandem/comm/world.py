# SPDX-License-Identifier: Apache-2.0
"""The default world of torch.distributed, which all processes of a pool join.

The devices of a world have one type. Groups across pools are independent of it: see ``group``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroup


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """The place of this process in a world.

    Attributes:
        name: the name of the world, unique in the store.
        device: the device of this process.
        library: the backend of the device's collectives, by its name in torch.distributed.
        timeout_s: the time limit of joining and of every collective.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    library: str
    timeout_s: float


_SPLITTING = ("nccl", "xccl")
"""The libraries whose groups torch splits, as it does for each mesh of a world with a device."""


def world_backend(device_type: str, library: str) -> str:
    """Return the backend string of a world: ``library`` on the device, gloo on the host.

    Example:
        >>> world_backend("npu", "hccl"), world_backend("cpu", "gloo")
        ('cpu:gloo,npu:hccl', 'gloo')
    """
    return library if device_type == "cpu" else f"cpu:gloo,{device_type}:{library}"


def consecutive_group(size: int, *, timeout_s: float) -> ProcessGroup | None:
    """Return the group of this process among runs of ``size`` consecutive ranks of the world.

    All processes of the world call this together. ``size`` divides their number.

    Returns:
        None if the group is the world.
    """
    rank, total = distributed.get_rank(), distributed.get_world_size()
    if size == total:
        return None
    groups = [
        distributed.new_group(list(range(first, first + size)), timedelta(seconds=timeout_s))
        for first in range(0, total, size)
    ]
    own = groups[rank // size]
    assert isinstance(own, ProcessGroup), "each process is in one of the groups"
    return own


def join_world(store: Store, place: WorldPlace) -> None:
    """Join the default world. Block until all its processes have joined.

    Args:
        store: the driver's store. Worlds of different names share no keys.
    """
    device, splits = place.device, place.library in _SPLITTING
    distributed.init_process_group(
        world_backend(device.type, place.library),
        store=PrefixStore(f"world/{place.name}", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=place.timeout_s),
        device_id=torch.device(device.type, device.index or 0) if splits else None,
    )
