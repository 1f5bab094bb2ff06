# SPDX-License-Identifier: Apache-2.0
"""Which set of operators a platform's decoder uses."""

from __future__ import annotations

from tandem.errors import UserError
from tandem.models.operators import TORCH, Operators
from tandem.platforms.record import Platform


def operators_for(platform: Platform) -> Operators:
    """The fused ones where Triton compiles for the platform, else torch's.

    Raises:
        UserError: triton is not installed.
    """
    if platform.kernels == "torch":
        return TORCH
    try:
        from tandem.models.kernels.operators import TRITON
    except ModuleNotFoundError as error:
        raise UserError(
            f"trainer.device={platform.name}: its kernels need triton ({error}). "
            "Install triton, or set trainer.device=cpu."
        ) from error
    return TRITON
