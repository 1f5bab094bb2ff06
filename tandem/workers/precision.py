# SPDX-License-Identifier: Apache-2.0
"""In which precision weights are kept and computed with, as a layout and a platform say."""

from __future__ import annotations

import logging

import torch

from tandem.config.schema.fsdp import FsdpConfig
from tandem.platforms.record import Platform
from tandem.platforms.select import resolve_dtype

logger = logging.getLogger(__name__)

ACTOR_SECTION = "actor_rollout_ref.actor.fsdp_config"


def stored_dtype(
    layout: FsdpConfig, platform: Platform, *, section: str = ACTOR_SECTION
) -> torch.dtype:
    """Of trained weights, their gradients and the optimizer; warns of a low one.

    Args:
        section: of the keys that ``layout`` came from, for messages.

    Raises:
        UserError: the device cannot compute in it.
    """
    stored = resolve_dtype(layout.model_dtype, platform, key=f"{section}.model_dtype")
    if stored != torch.float32:
        logger.warning(
            "%s.model_dtype=%s: weights, gradients and optimizer are kept in it alone, so "
            "that small updates round to nothing. Prefer float32.",
            section,
            layout.model_dtype,
        )
    return stored


def require_precision(layout: FsdpConfig, platform: Platform, *, section: str) -> None:
    """Raise UserError, as ``stored_dtype``, before anything is loaded."""
    for name, wanted in (("dtype", layout.dtype), ("model_dtype", layout.model_dtype)):
        resolve_dtype(wanted, platform, key=f"{section}.{name}")


def compute_dtype(
    layout: FsdpConfig, platform: Platform, *, section: str = ACTOR_SECTION
) -> torch.dtype:
    """Of forward and backward pass, and of all that does not train. As ``stored_dtype``."""
    return resolve_dtype(layout.dtype, platform, key=f"{section}.dtype")
