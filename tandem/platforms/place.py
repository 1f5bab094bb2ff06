# SPDX-License-Identifier: Apache-2.0
"""The place of a worker process in its pool, on its node and at its device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The place of a worker process.

    Attributes:
        pool: the pool's name.
        rank, size: the rank in the pool and the number of ranks; ranks on one node are contiguous.
        node: the node's number in the run's plan.
        node_address: the IP address by which other nodes reach it.
        device_index: the index of the worker's device in this process.
        physical_id: the device's name on its node; "" if devices are not isolated.
        flagcx_path: the value of FLAGCX_PATH in this process.
        wants_flagcx: whether FlagCX computes the collectives inside a pool.
    """

    pool: str
    rank: int
    size: int
    node: int
    node_address: str
    device_index: int = 0
    physical_id: str = ""
    flagcx_path: str = ""
    wants_flagcx: bool = False
