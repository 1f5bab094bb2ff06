# SPDX-License-Identifier: Apache-2.0
"""Uniform numbers that are a pure function of (seed, sample id, position).

There is no generator state: a sample draws the same numbers in any batch, in any order and on any
device. The hash is the finaliser of splitmix64 (Steele, Lea and Flood, OOPSLA 2014) in wrapping
int64 arithmetic. It is not cryptographic.

Shapes: B samples, J positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_MANTISSA_BITS = 24
_INCREMENT = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def stream_keys(
    seed: int,
    sample_ids: Sequence[int],
    *,
    first_indices: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Return one key per sample, int64 (B,), for ``uniforms``.

    Args:
        first_indices: the position in each sample's stream that counts as position 0: the tokens of
            earlier turns have used the numbers before it. None for 0.
    """
    seed_tensor = torch.tensor(_signed(seed), dtype=torch.int64, device=device)
    ids_B = torch.tensor([_signed(sample_id) for sample_id in sample_ids], device=device)
    keys_B = splitmix64(splitmix64(seed_tensor) + ids_B * _signed(_INCREMENT))
    if first_indices is None or not any(first_indices):
        return keys_B
    # ``uniforms`` adds the same increment for each position.
    return keys_B + torch.tensor(first_indices, device=device) * _signed(_INCREMENT)


def uniforms(keys_B: Tensor, positions_BJ: Tensor) -> Tensor:
    """Return 24-bit numbers in [0, 1), fp32 (B, J), at int64 positions of each key's stream."""
    bits_BJ = splitmix64(keys_B[:, None] + positions_BJ * _signed(_INCREMENT))
    return _shift_right(bits_BJ, 64 - _MANTISSA_BITS).float() * 2.0**-_MANTISSA_BITS


def splitmix64(state: Tensor) -> Tensor:
    """Return one output of splitmix64 for each int64 state: the increment, then the finaliser."""
    state = state + _signed(_INCREMENT)
    state = (state ^ _shift_right(state, 30)) * _signed(_MULTIPLIERS[0])
    state = (state ^ _shift_right(state, 27)) * _signed(_MULTIPLIERS[1])
    return state ^ _shift_right(state, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift logically. Shifts of int64 in torch keep the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    """Return the two's complement int64 with the same low 64 bits."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
