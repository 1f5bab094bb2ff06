# SPDX-License-Identifier: Apache-2.0
"""Rounding to bf16 at random, so that the mean of what is rounded is the number itself.

To the nearest, what changes by less than half of the last digit never changes: a moment that decays
by a thousandth a step would stay what it is. Not for numbers that are not finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOST_BITS = 16
"""Of the mantissa of fp32."""


def round_at_random(x_N: Tensor, generator: torch.Generator) -> Tensor:
    """The bf16 neighbours of fp32 numbers, each as likely as it is near; 0 and bf16 numbers stay.

    Args:
        generator: of the device of ``x_N``; it alone decides.
    """
    noise_N = torch.empty_like(x_N, dtype=torch.int32)
    noise_N.random_(0, 1 << _LOST_BITS, generator=generator)
    noise_N += x_N.view(torch.int32)  # sign and magnitude: the carry moves away from zero
    noise_N &= -1 << _LOST_BITS
    return noise_N.view(torch.float32).bfloat16()
