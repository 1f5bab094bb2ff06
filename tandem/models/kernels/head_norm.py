# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton kernels: the norms of the queries and keys of all tokens in one pass, and their gradients.

Arithmetic is fp32 with one rounding at the end. Gradients are deterministic: each program sums the
weight gradients of its own rows, and torch adds the programs' sums. The backward pass computes the
root mean squares again. fp64 is not supported.

Shapes: T tokens, M heads of queries and keys, E head dimension, P programs of the backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 2048
"""Numbers that a program computes at once."""
_MAX_PROGRAMS = 2048
"""Of the backward pass: enough to fill an accelerator, and few enough to sum quickly."""


def norm_heads(
    x_TME: Tensor, num_queries: int, *, q_weight_E: Tensor, k_weight_E: Tensor, eps: float
) -> Tensor:
    """See ``operators.Operators.norm_heads``."""
    if torch.is_grad_enabled():
        return _NormHeads.apply(x_TME, q_weight_E, k_weight_E, num_queries, eps)
    return _forward(x_TME, (q_weight_E, k_weight_E), num_queries=num_queries, eps=eps)


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TME: Tensor,
        q_weight_E: Tensor,
        k_weight_E: Tensor,
        num_queries: int,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x_TME, q_weight_E, k_weight_E)
        ctx.num_queries, ctx.eps = num_queries, eps
        return _forward(x_TME, (q_weight_E, k_weight_E), num_queries=num_queries, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TME: Tensor) -> Any:
        x_TME, q_weight_E, k_weight_E = ctx.saved_tensors
        x_TME = _with_whole_heads(x_TME)
        num_tokens, num_heads, head_dim = x_TME.shape
        rows, block = _tile(head_dim)
        programs = min(-(-num_tokens * num_heads // rows), _MAX_PROGRAMS)
        grad_x_TME = torch.empty(x_TME.shape, dtype=x_TME.dtype, device=x_TME.device)
        size = (programs, 2, head_dim)
        partial_P2E = torch.empty(size, dtype=torch.float32, device=x_TME.device)
        _norm_backward.run(
            grad_x_TME,
            partial_P2E,
            grad_TME.contiguous(),
            x_TME,
            q_weight_E,
            k_weight_E,
            num_tokens * num_heads,
            x_TME.stride(0),
            x_TME.stride(1),
            ctx.eps,
            QUERIES=ctx.num_queries,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            ROWS=rows,
            BLOCK=block,
            grid=(programs,),
            warmup=False,
        )
        of_q_E, of_k_E = partial_P2E.sum(0).to(q_weight_E.dtype)
        return grad_x_TME, of_q_E, of_k_E, None, None


@cache
def _tile(head_dim: int) -> tuple[int, int]:
    """Return the rows of a program, each one head of one token, and the columns of a row."""
    block = 1 << (head_dim - 1).bit_length()
    return max(_BLOCK // block, 1), block


def _with_whole_heads(x_TME: Tensor) -> Tensor:
    return x_TME if x_TME.stride(2) == 1 else x_TME.contiguous()


def _forward(
    x_TME: Tensor, weights: tuple[Tensor, Tensor], *, num_queries: int, eps: float
) -> Tensor:
    x_TME = _with_whole_heads(x_TME)
    num_tokens, num_heads, head_dim = x_TME.shape
    rows, block = _tile(head_dim)
    y_TME = torch.empty(x_TME.shape, dtype=x_TME.dtype, device=x_TME.device)
    _norm.run(
        y_TME,
        x_TME,
        *weights,
        num_tokens * num_heads,
        x_TME.stride(0),
        x_TME.stride(1),
        eps,
        QUERIES=num_queries,
        HEADS=num_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK=block,
        grid=(-(-num_tokens * num_heads // rows),),
        warmup=False,
    )
    return y_TME


@triton.jit
def _normed(
    x_ptr,
    row,
    column,
    inside,
    token_stride,
    head_stride,
    eps,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Return rows, each a head of a token, times their inverse root mean squares, and these."""
    token, head = (row // HEADS).to(tl.int64), (row % HEADS).to(tl.int64)
    x_at = x_ptr + token * token_stride + head * head_stride + column
    x = tl.load(x_at, inside, 0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / HEAD_DIM + eps)
    return x * inverse, inverse


@triton.jit(do_not_specialize=["num_rows"])
def _norm(
    y_ptr,
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_rows,
    token_stride,
    head_stride,
    eps,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < HEAD_DIM)
    normed, _ = _normed(x_ptr, row, column, inside, token_stride, head_stride, eps, HEADS, HEAD_DIM)
    of_q = tl.load(q_weight_ptr + column, column < HEAD_DIM, 0.0).to(tl.float32)
    of_k = tl.load(k_weight_ptr + column, column < HEAD_DIM, 0.0).to(tl.float32)
    y = normed * tl.where(row % HEADS < QUERIES, of_q, of_k)
    tl.store(y_ptr + row.to(tl.int64) * HEAD_DIM + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_backward(
    grad_x_ptr,
    partial_ptr,
    grad_ptr,
    x_ptr,
    q_weight_ptr,
    k_weight_ptr,
    num_rows,
    token_stride,
    head_stride,
    eps,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    column = tl.arange(0, BLOCK)[None, :]
    is_column = column < HEAD_DIM
    of_q = tl.load(q_weight_ptr + column, is_column, 0.0).to(tl.float32)
    of_k = tl.load(k_weight_ptr + column, is_column, 0.0).to(tl.float32)
    sum_q = tl.zeros([ROWS, BLOCK], tl.float32)
    sum_k = tl.zeros([ROWS, BLOCK], tl.float32)
    first = tl.program_id(0) * ROWS
    while first < num_rows:
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < num_rows) & is_column
        normed, inverse = _normed(
            x_ptr, row, column, inside, token_stride, head_stride, eps, HEADS, HEAD_DIM
        )
        at = row.to(tl.int64) * HEAD_DIM + column
        grad_y = tl.load(grad_ptr + at, inside, 0.0).to(tl.float32)
        is_q = row % HEADS < QUERIES
        product = grad_y * normed
        sum_q += tl.where(is_q, product, 0.0)
        sum_k += tl.where(is_q, 0.0, product)
        grad = grad_y * tl.where(is_q, of_q, of_k)
        grad = (grad - normed * (tl.sum(grad * normed, 1, keep_dims=True) / HEAD_DIM)) * inverse
        tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), inside)
        first += tl.num_programs(0) * ROWS
    partial_at = partial_ptr + tl.program_id(0).to(tl.int64) * (2 * HEAD_DIM) + column
    tl.store(partial_at, tl.sum(sum_q, 0, keep_dims=True), is_column)
    tl.store(partial_at + HEAD_DIM, tl.sum(sum_k, 0, keep_dims=True), is_column)
