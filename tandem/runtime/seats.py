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
from tandem.runtime.attach import Reservation
from tandem.runtime.hosted import Opened, Seat

if TYPE_CHECKING:
    from tandem.platforms.record import Platform

_MAX_HOST_THREADS = 16


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
            )
            cores = (os.cpu_count() or 1) // on_node[node]
            is_host = visibility.mode == "none"
            num_threads = 1 if is_host else max(1, min(cores, _MAX_HOST_THREADS))
            capacity = int(reserved[node].resources[visibility.resource])
            seats.append(Seat(place, visibility, capacity, os.getcwd(), num_threads))
    return seats


def require_distinct(seats: Sequence[Seat], opened: Sequence[Opened]) -> None:
    """No two processes may have taken one device of a node."""
    taken: dict[tuple[str, str, str], Opened] = {}
    for seat, one in zip(seats, opened, strict=True):
        device = (one.place.physical_id, seat.visibility.resource, one.place.node_address)
        other = taken.setdefault(device, one)
        if one.place.physical_id and other is not one:
            raise UserError(
                f"device {device[0]} of {one.host}: {one.place.pool} rank {one.place.rank} and "
                f"{other.place.pool} rank {other.place.rank} were both given it "
                f"({one.isolation}). Unset what makes Ray share devices."
            )
