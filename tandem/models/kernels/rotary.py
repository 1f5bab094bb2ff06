# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: the rotary embedding of all heads of all tokens in one pass, forward and backward.

The backward pass is the same rotation with the sines of the two halves exchanged. Arithmetic is
fp32 with one rounding at the end. Angles have no gradient. fp64 is not supported.

Shapes: T tokens, M heads, E head dimension.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.models.operators import Angles

_PAIRS_PER_PROGRAM = 1024


def rotate(x_TME: Tensor, angles: Angles) -> Tensor:
    """See ``operators.Operators.rotate``."""
    if torch.is_grad_enabled():
        return _Rotate.apply(x_TME, *angles)
    return _launch(x_TME, angles, transposed=False)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TME: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
        ctx.save_for_backward(cos_T1E, sin_T1E)
        return _launch(x_TME, (cos_T1E, sin_T1E), transposed=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TME: Tensor) -> Any:
        return _launch(grad_TME, ctx.saved_tensors, transposed=True), None, None


@cache
def _tile(head_dim: int) -> tuple[int, int]:
    """Return the rows of a program, each one head of one token, and the pairs of a row."""
    pairs = 1 << (head_dim // 2 - 1).bit_length()
    return max(_PAIRS_PER_PROGRAM // pairs, 1), pairs


def _launch(x_TME: Tensor, angles: Angles, *, transposed: bool) -> Tensor:
    """Apply the rotation or its transpose, without a copy if the last dimension is contiguous."""
    if x_TME.stride(2) != 1:
        x_TME = x_TME.contiguous()
    num_tokens, num_heads, head_dim = x_TME.shape
    rows, pairs = _tile(head_dim)
    y_TME = torch.empty(x_TME.shape, dtype=x_TME.dtype, device=x_TME.device)
    cos_T1E, sin_T1E = angles
    _rotate.run(
        y_TME,
        x_TME,
        cos_T1E.contiguous(),
        sin_T1E.contiguous(),
        num_tokens * num_heads,
        x_TME.stride(0),
        x_TME.stride(1),
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        PAIRS=pairs,
        TRANSPOSED=transposed,
        grid=(-(-num_tokens * num_heads // rows),),
        warmup=False,
    )
    return y_TME


@triton.jit(do_not_specialize=["num_rows"])
def _rotate(
    y_ptr,
    x_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    token_stride,
    head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (row < num_rows) & (pair < HALF)
    token = (row // HEADS).to(tl.int64)
    head = (row % HEADS).to(tl.int64)

    at = token * HEAD_DIM + pair
    cos_1 = tl.load(cos_ptr + at, inside, 0.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + at + HALF, inside, 0.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + at, inside, 0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + at + HALF, inside, 0.0).to(tl.float32)
    if TRANSPOSED:
        sin_1, sin_2 = sin_2, sin_1

    at = token * token_stride + head * head_stride + pair
    x_1 = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    x_2 = tl.load(x_ptr + at + HALF, inside, 0.0).to(tl.float32)
    y_1 = x_1 * cos_1 + x_2 * sin_1
    y_2 = x_2 * cos_2 + x_1 * sin_2
    at = row.to(tl.int64) * HEAD_DIM + pair
    tl.store(y_ptr + at, y_1.to(y_ptr.dtype.element_ty), inside)
    tl.store(y_ptr + at + HALF, y_2.to(y_ptr.dtype.element_ty), inside)
