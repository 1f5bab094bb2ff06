# SPDX-License-Identifier: Apache-2.0
"""FlagCX's plug-in for torch.distributed, which makes it a back end of process groups.

The plug-in's package loads itself with ``import torch`` wherever it is installed, and then changes
torch.distributed; nothing here imports it.
"""

from __future__ import annotations

from importlib.util import find_spec

from torch import distributed

from tandem.comm.world import world_backend
from tandem.errors import UserError

BACKEND = "flagcx"


def plugin_devices() -> tuple[str, ...]:
    """The types of device that it serves in this process; none if it is not loaded."""
    return tuple(distributed.Backend.backend_capability.get(BACKEND, ()))


def flagcx_world_backend(device_type: str) -> str:
    """The backends of a default world whose devices communicate by FlagCX.

    Raises:
        UserError: the plug-in is not here, or serves no such device.

    Example:
        where it is installed, on a node with such devices::

            flagcx_world_backend("musa") == "cpu:gloo,musa:flagcx"
    """
    devices = plugin_devices()
    if device_type in devices:
        return world_backend(device_type, BACKEND)
    if devices:
        reason = f"serves {', '.join(devices)}, as it was built. Build it for {device_type}"
    elif find_spec(BACKEND) is None:
        reason = "is not installed. Install FlagCX's Python package"
    else:
        reason = "is installed, but torch has not loaded it. Unset TORCH_DEVICE_BACKEND_AUTOLOAD"
    raise UserError(
        f"backend={world_backend(device_type, BACKEND)}: FlagCX's plug-in for torch {reason}, "
        "or use the device's own library."
    )
