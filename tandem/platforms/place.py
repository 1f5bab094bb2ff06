# SPDX-License-Identifier: Apache-2.0
"""Where a worker process stands: in its pool, on its node, at its device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Handed to what builds a worker's engines, in the worker's process.

    Attributes:
        pool: the pool's name.
        rank, size: within the pool; ranks on one node are contiguous.
        node: the node's number in the run, as the plan counts nodes.
        node_address: its IP address, by which other nodes reach it.
        local_rank, local_size: among the workers of this pool on this node.
        device_index: of this worker's device, in this process.
        physical_id: the device's name on its node; "" where devices are not isolated.
        flagcx_path: FLAGCX_PATH of this process.
        wants_flagcx: whether collectives inside a pool of devices are to be FlagCX's.
    """

    pool: str
    rank: int
    size: int
    node: int
    node_address: str
    local_rank: int
    local_size: int
    device_index: int = 0
    physical_id: str = ""
    flagcx_path: str = ""
    wants_flagcx: bool = False
