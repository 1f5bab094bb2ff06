# SPDX-License-Identifier: Apache-2.0
"""How small tensors of the host get to a device without making the host wait for it."""

from __future__ import annotations

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``; itself if it is there already.

    From ordinary memory a copy waits for all that is queued on the device. Through pinned memory it
    is queued too, and the host goes on to prepare the next micro-batch meanwhile.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
