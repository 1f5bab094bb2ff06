# SPDX-License-Identifier: Apache-2.0
"""The default world of torch.distributed in one process, and worlds whose processes have devices of
several types. Groups across pools do not depend on it: see ``group``.

Nothing of torch is patched. Where torch keeps the processes of one group apart because it calls
their devices differently, their backend is registered a second time, in a form that does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import Backend, ProcessGroup

from tandem.comm.deadline import GroupError
from tandem.comm.order import require_contiguous

_MIXED = "_mixed"


@dataclass(frozen=True, slots=True)
class WorldPlace:
    """This process's place in a world.

    Attributes:
        name: of the world; unique in the store.
        device: where this process computes.
        library: the collectives of its device, as torch.distributed knows them.
        timeout_s: bounds joining, and every collective.
    """

    name: str
    rank: int
    size: int
    device: torch.device
    library: str
    timeout_s: float

    @property
    def backend(self) -> str:
        """That of this process's tensors, on the host as well as on its device."""
        return world_backend(self.device.type, self.library)


def world_backend(device_type: str, library: str) -> str:
    """The backends of a world: that of the device, and gloo for tensors on the host.

    Example:
        >>> world_backend("npu", "hccl"), world_backend("cpu", "gloo")
        ('cpu:gloo,npu:hccl', 'gloo')
    """
    return library if device_type == "cpu" else f"cpu:gloo,{device_type}:{library}"


def join_world(store: Store, place: WorldPlace) -> None:
    """Make this process one of a world of devices of one type. Blocks until all have joined.

    Args:
        store: the driver's; the names of several worlds do not meet in it.
    """
    _join(store, place, backend=place.backend)


def join_mixed_world(store: Store, place: WorldPlace) -> ProcessGroup | None:
    """Make this process one of a world whose devices have several types. Blocks until all joined.

    All processes share the default group, which is for tensors on the host. Those with a device
    also share the returned one, for tensors on either; None in those without.

    Args:
        place: ``library`` must connect the devices; see ``mixed_backend``.

    Raises:
        GroupError: the devices could not be connected in time.
        UserError: devices of one type do not have consecutive ranks.
    """
    _join(store, place, backend="gloo")
    told: list[Any] = [None] * place.size
    distributed.all_gather_object(told, (place.device.type, place.backend))
    types: list[str] = [device_type for device_type, _ in told]
    require_contiguous(types)
    ranks = [rank for rank, device_type in enumerate(types) if device_type != "cpu"]
    try:
        group = distributed.new_group(
            ranks,
            timeout=timedelta(seconds=place.timeout_s),
            backend=place.backend,
        )
    except RuntimeError as error:
        strings = ", ".join(f"rank {rank} has {told[rank][1]}" for rank in ranks)
        raise GroupError(
            f"world {place.name}: its devices were not connected within {place.timeout_s:g} s: "
            f"{strings}. A library connects devices of several types only as mixed_backend() "
            "registers it, in every process"
        ) from error
    return group if isinstance(group, ProcessGroup) else None


def mixed_backend(library: str, device_type: str) -> str:
    """Register ``library`` a second time so that its groups form among processes whose devices have
    other types. Returns its name; idempotent.

    torch lets the processes of a group meet at keys that begin with the type of the device. Here
    they meet one level above.

    Raises:
        GroupError: torch.distributed does not know the library.
    """
    name = library + _MIXED
    if name.upper() not in plugins():
        create = _creator(library)

        def create_mixed(options: Any, settings: Any = None) -> Any:
            del settings
            options.store = PrefixStore("devices", options.store.underlying_store)
            return create(options)

        Backend.register_backend(name, create_mixed, extended_api=True, devices=[device_type])
    return name


def plugins() -> dict[str, Any]:
    """The libraries that were registered with torch.distributed in this process, in capitals."""
    return Backend._plugins


def create_backend(
    library: str, store: Store, *, rank: int, members: Sequence[int], timeout_s: float
) -> Any:
    """A backend of a registered library for a group of its own.

    Args:
        rank: its place in ``members``.
        members: numbers of the processes.

    Raises:
        GroupError: torch.distributed does not know the library.
    """
    options = c10d._DistributedBackendOptions()
    options.store = store
    options.group_rank = rank
    options.group_size = len(members)
    options.timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group = list(members)
    options.group_id = "tandem"
    return _creator(library)(options)


def leave_world(*, peers_alive: bool = True) -> None:
    """Leave the default world; idempotent. Where peers may be dead nothing waits for them."""
    if not distributed.is_initialized():
        return
    if peers_alive:
        distributed.destroy_process_group()
    else:
        distributed.distributed_c10d._abort_process_group()


def _join(store: Store, place: WorldPlace, *, backend: str) -> None:
    is_bound = place.device.type != "cpu" and backend != "gloo"
    distributed.init_process_group(
        backend,
        store=PrefixStore(f"world/{place.name}", store),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=place.timeout_s),
        device_id=torch.device(place.device.type, place.device.index or 0) if is_bound else None,
    )


def _creator(library: str) -> Callable[[Any], Any]:
    """What makes a backend from torch's options, in either form of registering one."""
    plugin = plugins().get(library.upper())
    if plugin is None:
        raise GroupError(
            f"torch.distributed has no {library} in this process: what brings it is not loaded"
        )
    if plugin.extended_api:
        return lambda options: plugin.creator_fn(options, None)
    return lambda options: plugin.creator_fn(
        options.store, options.group_rank, options.group_size, options.timeout
    )
