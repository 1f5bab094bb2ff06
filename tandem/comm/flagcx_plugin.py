# SPDX-License-Identifier: Apache-2.0
"""FlagCX's plug-in for torch.distributed, which makes it a backend of process groups.

If the plug-in is installed, ``import torch`` loads it, and it changes torch.distributed.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import distributed

from tandem.errors import UserError
from tandem.platforms.record import Platform

BACKEND = "flagcx"


def plugin_devices() -> tuple[str, ...]:
    """Return the device types that the plug-in supports; none if it is not loaded."""
    return tuple(distributed.Backend.backend_capability.get(BACKEND, ()))


def pool_library(platform: Platform, *, wants_flagcx: bool) -> str:
    """Return the backend of the collectives inside a pool, by its name in torch.distributed.

    It is the platform's own backend, or FlagCX if requested and the pool has devices.

    Raises:
        UserError: FlagCX is requested, but the plug-in is missing or does not support the device.
    """
    if not wants_flagcx or not platform.has_own_memory:
        return platform.collectives
    devices = plugin_devices()
    if platform.device_type in devices:
        return BACKEND
    if devices:
        state = f"was built for {', '.join(devices)}"
        remedy = f"Build it for {platform.name}"
    elif find_spec(BACKEND) is None:
        state, remedy = "is not installed", "Install FlagCX's Python package"
    else:
        state = "is installed, but torch has not loaded it"
        remedy = "Unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    raise UserError(
        "USE_FLAGCX",
        1,
        rule=f"FlagCX's plug-in for torch {state}",
        remedy=f"{remedy}, or unset USE_FLAGCX for {platform.collectives}, the device's library.",
    )
