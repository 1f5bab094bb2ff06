# SPDX-License-Identifier: Apache-2.0
"""The memory of the host that a run needs for weights and optimizer states that rest there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from tandem.config.derived.trained_model import place
from tandem.config.plan.memory import MemoryPlan
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

HOST_SHARE = 0.9
"""The share of the host's memory that offloaded data may take. The remainder is for the processes.
It is chosen, not measured.
"""


def resting_bytes(config: RunConfig | SftConfig, plans: Mapping[str, MemoryPlan]) -> int:
    """Return the bytes that rest on the node with the most of them.

    Args:
        plans: the memory of one device of each pool.
    """
    placement = place(config)
    of_node: Counter[int] = Counter()
    for pool in placement.used_pools:
        for devices in placement.node_ranges(pool):
            num_devices = devices.last - devices.first + 1
            of_node[devices.node] += plans[pool.name].host * num_devices
    return max(of_node.values(), default=0)


def fits_host(
    config: RunConfig | SftConfig, plans: Mapping[str, MemoryPlan], *, host_bytes: int | None
) -> bool:
    """Return whether the hosts have room for what rests there.

    Args:
        host_bytes: the memory of a host; None if it is not known.
    """
    return host_bytes is None or resting_bytes(config, plans) <= HOST_SHARE * host_bytes
