# SPDX-License-Identifier: Apache-2.0
"""FlagCX's plug-in for torch.distributed, which makes it a back end of process groups.

The plug-in's package loads itself with ``import torch`` wherever it is installed, and then changes
torch.distributed; nothing here imports it.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import distributed

from tandem.errors import UserError
from tandem.platforms.record import Platform

BACKEND = "flagcx"


def plugin_devices() -> tuple[str, ...]:
    """The types of device that it serves in this process; none if it is not loaded."""
    return tuple(distributed.Backend.backend_capability.get(BACKEND, ()))


def pool_library(platform: Platform, *, wants_flagcx: bool) -> str:
    """What does the collectives inside a pool, as torch.distributed knows it: the platform's own,
    or FlagCX where that is wanted and the pool has devices.

    Raises:
        UserError: it is wanted, and the plug-in is not here or serves no such device.
    """
    if not wants_flagcx or not platform.has_own_memory:
        return platform.collectives
    devices = plugin_devices()
    if platform.device_type in devices:
        return BACKEND
    if devices:
        reason = f"serves {', '.join(devices)}, as it was built. Build it for {platform.name}"
    elif find_spec(BACKEND) is None:
        reason = "is not installed. Install FlagCX's Python package"
    else:
        reason = "is installed, but torch has not loaded it. Unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    raise UserError(
        f"USE_FLAGCX=1: FlagCX's plug-in for torch {reason}, or unset USE_FLAGCX for "
        f"{platform.collectives}, the device's own library."
    )
