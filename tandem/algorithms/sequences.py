# SPDX-License-Identifier: Apache-2.0
"""Reductions over the flat layout: R response tokens of N sequences in order, without padding.

``sequence_R`` (int64) names the sequence of each token, ascending from 0. A sequence may have no
token. There is no loop over tokens and no synchronisation with the device in here.

Shapes: R response tokens, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sum_by_sequence(values_R: Tensor, sequence_R: Tensor, *, num_sequences: int) -> Tensor:
    """Sum of each sequence's tokens, (N,); differentiable."""
    return values_R.new_zeros(num_sequences).index_add(0, sequence_R, values_R)


def count_by_sequence(sequence_R: Tensor, num_sequences: int) -> Tensor:
    """Number of tokens of each sequence, fp32 (N,)."""
    ones_R = torch.ones(sequence_R.shape, dtype=torch.float32, device=sequence_R.device)
    return sum_by_sequence(ones_R, sequence_R, num_sequences=num_sequences)


def last_tokens(sequence_R: Tensor) -> Tensor:
    """Whether a token is the last of its sequence, bool (R,)."""
    is_last_R = torch.ones_like(sequence_R, dtype=torch.bool)
    is_last_R[:-1] = sequence_R[1:] != sequence_R[:-1]
    return is_last_R


def shift_from_next(values_R: Tensor, sequence_R: Tensor) -> Tensor:
    """The value of the following token of the same sequence, 0 after the last one, (R,)."""
    shifted_R = torch.zeros_like(values_R)
    same_R = sequence_R[1:] == sequence_R[:-1]
    shifted_R[:-1] = torch.where(same_R, values_R[1:], 0.0)
    return shifted_R


def discounted_suffix_sum(values_R: Tensor, sequence_R: Tensor, *, discount: float) -> Tensor:
    """``y_t = x_t + discount * y_(t+1)`` within each sequence, (R,).

    By doubling: after k rounds y_t covers 2^k tokens, so a batch takes log2(R) rounds whatever its
    lengths.
    """
    total_R = values_R.clone()
    reach, factor = 1, discount
    while reach < len(values_R):
        same_R = sequence_R[reach:] == sequence_R[:-reach]
        addend_R = torch.where(same_R, factor * total_R[reach:], 0.0)
        total_R = torch.cat((total_R[:-reach] + addend_R, total_R[-reach:]))
        reach, factor = 2 * reach, factor * factor
    return total_R
