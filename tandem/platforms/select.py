# SPDX-License-Identifier: Apache-2.0
"""Which platform a run uses: the one asked for if it is here, else the first available one with a
warning.

``trainer.device`` keeps verl's meaning: verl overrides it with the detected device and warns, and
published commands rely on that (docs/adr/0002-trainer-device.md).
"""

from __future__ import annotations

import logging

import torch

from tandem.errors import UserError
from tandem.platforms.record import PLATFORMS, Platform

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_platform(requested: str) -> Platform:
    """The platform named by ``trainer.device``, or the detected one (for ``auto``, or warning)."""
    detected = next(platform for platform in PLATFORMS.values() if platform.is_available())
    if requested == "auto":
        return detected
    wanted = PLATFORMS.get(requested)
    if wanted is not None and wanted.is_available():
        return wanted
    reason = "is not built yet" if wanted is None else "finds no usable device"
    logger.warning(
        "trainer.device=%s: this platform %s here. Running on %s.", requested, reason, detected.name
    )
    return detected


def resolve_dtype(name: str, platform: Platform, *, key: str) -> torch.dtype:
    """The torch dtype of a config value; ``auto`` is the platform's own compute precision.

    Args:
        key: where the value stands in the configuration, for the message.

    Raises:
        UserError: the device cannot compute in it.
    """
    dtype = platform.compute_dtype if name == "auto" else DTYPES[name]
    if dtype == torch.bfloat16 and not platform.has_bfloat16():
        raise UserError(
            f"{key}={name}: {platform.device_name()} does not compute in bfloat16. "
            f"Set {key}=float32."
        )
    return dtype
