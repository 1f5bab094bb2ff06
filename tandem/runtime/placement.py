# SPDX-License-Identifier: Apache-2.0
"""Who sits where: what each new worker process is told, and that no two took the same device.

Nothing is started here, and torch is not imported: workers load this before they are isolated.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tandem.errors import UserError
from tandem.platforms.place import WorkerPlace
from tandem.runtime.ray_cluster import Reservation
from tandem.runtime.worker_process import Opened, Seat

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

FLAGCX_VARIABLE = "USE_FLAGCX"
"""verl-FL's. The driver's holds for all workers: those of a group must agree."""
_MAX_HOST_THREADS = 16
_PARTS = "MIG-"
"""What names of parts of devices begin with."""


def seats_of(
    pools: Mapping[str, Sequence[int]],
    reserved: Mapping[int, Reservation],
    *,
    platforms: Mapping[str, Platform],
) -> list[Seat]:
    """Those of all ranks of all pools; ``pools`` has the planned node of each rank."""
    on_node = Counter(node for nodes in pools.values() for node in nodes)
    seats = []
    for pool, nodes in pools.items():
        visibility = platforms[pool].visibility
        for rank, node in enumerate(nodes):
            place = WorkerPlace(
                pool=pool,
                rank=rank,
                size=len(nodes),
                node=node,
                node_address=reserved[node].address,
                local_rank=nodes[:rank].count(node),
                local_size=nodes.count(node),
                wants_flagcx=os.environ.get(FLAGCX_VARIABLE, "").lower() in ("1", "true"),
            )
            cores = (os.cpu_count() or 1) // on_node[node]
            is_host = visibility.mode == "none"
            num_threads = 1 if is_host else max(1, min(cores, _MAX_HOST_THREADS))
            capacity = int(reserved[node].resources[visibility.resource])
            seats.append(Seat(place, visibility, capacity, os.getcwd(), num_threads))
    return seats


def require_distinct(
    opened: Sequence[Opened], uuids: Sequence[str], *, platforms: Mapping[str, Platform]
) -> None:
    """No two processes may have taken one device of a node, by whatever names.

    Args:
        uuids: of each process its ``Platform.device_uuid``.
        platforms: of each pool.
    """
    taken: dict[tuple[str, str, str], Opened] = {}
    for one, uuid in zip(opened, uuids, strict=True):
        place = one.place
        # A part of a device may have the uuid of the whole, and is told apart by its own name.
        part = place.physical_id if place.physical_id.startswith(_PARTS) else ""
        resource = platforms[place.pool].visibility.resource
        for kind, name in ((resource, place.physical_id), (f"uuid {part}", uuid)):
            other = taken.setdefault((place.node_address, kind, name), one)
            if name and other is not one:
                raise UserError(
                    f"device {name} of {one.host}: {_named(other)} and {_named(one)} were both "
                    f"given it ({one.isolation}). Unset what makes Ray share devices, or what "
                    "lists one by two names."
                )


def _named(one: Opened) -> str:
    return f"{one.place.pool} rank {one.place.rank} (as device {one.place.physical_id})"
