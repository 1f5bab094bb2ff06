# SPDX-License-Identifier: Apache-2.0
"""The default world of torch.distributed in one process of a pool. Groups across pools do not
depend on it: see ``group``.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore, Store

DEVICE_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""The collective library that is native to a type of device."""
IPC_DEVICES = frozenset({"cuda"})
"""Types of device whose memory another process on the same device can map."""


def world_backend(device_type: str) -> str:
    """The backends of a default world: that of the device, and gloo for tensors on the host.

    Example:
        >>> world_backend("cuda")
        'cpu:gloo,cuda:nccl'
    """
    native = DEVICE_BACKENDS[device_type]
    return native if device_type == "cpu" else f"cpu:gloo,{device_type}:{native}"


def join_world(
    store: Store, pool: str, *, rank: int, size: int, device: torch.device, timeout_s: float
) -> None:
    """Make this process rank ``rank`` of the ``size`` of ``pool``. Blocks until all have joined.

    Args:
        store: the driver's; the names of several pools do not meet in it.
        device: where this process computes.
        timeout_s: bounds this call and every collective of the world.
    """
    is_device = device.type != "cpu"
    distributed.init_process_group(
        world_backend(device.type),
        store=PrefixStore(f"world/{pool}", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=torch.device(device.type, device.index or 0) if is_device else None,
    )


def leave_world(*, peers_alive: bool = True) -> None:
    """Leave the default world; idempotent. Where peers may be dead nothing waits for them."""
    if not distributed.is_initialized():
        return
    if peers_alive:
        distributed.destroy_process_group()
    else:
        distributed.distributed_c10d._abort_process_group()
