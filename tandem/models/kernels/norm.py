# SPDX-License-Identifier: Apache-2.0
"""Triton kernels: residual sum and root mean square norm in one pass, and their gradients.

The sum is rounded to the dtype of the stream. The norm of the rounded sum is computed in fp32 and
rounded once, to the dtype of the weight. The added tensor and the norm may have a lower precision
than the stream. Gradients are deterministic: each program sums the weight gradient of its own rows,
and torch adds the programs' sums. fp64 is not supported.

Shapes: T tokens, D hidden, P programs of the backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_MAX_PARTIAL_ELEMENTS = 2**20
"""The limit of P * D: enough programs to fill an accelerator, and few enough to sum quickly."""
_MIN_ROWS_PER_PROGRAM = 4


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, *, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``operators.Operators.add_norm``. Without a delta, the sum is x itself."""
    if torch.is_grad_enabled():
        return _AddNorm.apply(x_TD, delta_TD, weight_D, eps)
    return _forward(x_TD, delta_TD, weight_D=weight_D, eps=eps)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        inverse_T = torch.empty(x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
        h_TD, sum_TD = _forward(x_TD, delta_TD, weight_D=weight_D, eps=eps, inverse_T=inverse_T)
        ctx.set_materialize_grads(False)
        ctx.delta_dtype = x_TD.dtype if delta_TD is None else delta_TD.dtype
        ctx.save_for_backward(sum_TD, inverse_T, weight_D)
        return h_TD, sum_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h_TD: Tensor | None, grad_sum_TD: Tensor | None) -> Any:
        wanted = ctx.delta_dtype if ctx.needs_input_grad[1] else None
        if grad_h_TD is None:
            grad_delta_TD = None
            if grad_sum_TD is not None and wanted is not None:
                grad_delta_TD = grad_sum_TD.to(wanted)
            return grad_sum_TD, grad_delta_TD, None, None
        gradients = _backward(grad_h_TD, grad_sum_TD, saved=ctx.saved_tensors, delta_dtype=wanted)
        return *gradients, None


@cache
def _block_and_warps(hidden: int) -> tuple[int, int]:
    """Return the number of columns of a program, a power of two, and its number of warps."""
    block = 1 << (hidden - 1).bit_length()
    return block, min(max(block // 256, 1), 16)


def _forward(
    x_TD: Tensor,
    delta_TD: Tensor | None,
    *,
    weight_D: Tensor,
    eps: float,
    inverse_T: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norm and sum, and write the fp32 inverse root mean squares to ``inverse_T``."""
    num_rows, hidden = x_TD.shape
    block, num_warps = _block_and_warps(hidden)
    input_TD = x_TD.contiguous()
    h_TD = torch.empty_like(input_TD, dtype=weight_D.dtype)
    sum_TD = x_TD if delta_TD is None else torch.empty_like(input_TD)
    _add_norm.run(
        h_TD,
        sum_TD,
        h_TD if inverse_T is None else inverse_T,
        input_TD,
        input_TD if delta_TD is None else delta_TD.contiguous(),
        weight_D,
        eps,
        D=hidden,
        BLOCK=block,
        ADDS=delta_TD is not None,
        KEEPS=inverse_T is not None,
        grid=(num_rows,),
        warmup=False,
        num_warps=num_warps,
    )
    return h_TD, sum_TD


def _backward(
    grad_h_TD: Tensor,
    grad_sum_TD: Tensor | None,
    *,
    saved: tuple[Tensor, ...],
    delta_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of stream, added tensor (None without ``delta_dtype``) and weight."""
    sum_TD, inverse_T, weight_D = saved
    num_rows, hidden = sum_TD.shape
    block, num_warps = _block_and_warps(hidden)
    programs = min(-(-num_rows // _MIN_ROWS_PER_PROGRAM), _MAX_PARTIAL_ELEMENTS // block)
    grad_h_TD, sum_TD = grad_h_TD.contiguous(), sum_TD.contiguous()
    grad_x_TD = torch.empty_like(sum_TD)
    grad_delta_TD = None
    if delta_dtype is not None:
        same = delta_dtype == sum_TD.dtype
        grad_delta_TD = grad_x_TD if same else torch.empty_like(sum_TD, dtype=delta_dtype)
    partial_PD = torch.empty((programs, hidden), dtype=torch.float32, device=sum_TD.device)
    _add_norm_backward.run(
        grad_x_TD,
        grad_x_TD if grad_delta_TD is None else grad_delta_TD,
        partial_PD,
        grad_h_TD,
        grad_h_TD if grad_sum_TD is None else grad_sum_TD.contiguous(),
        sum_TD,
        inverse_T,
        weight_D,
        num_rows,
        D=hidden,
        BLOCK=block,
        ADDS=grad_sum_TD is not None,
        SPLITS=grad_delta_TD is not None and grad_delta_TD is not grad_x_TD,
        grid=(programs,),
        warmup=False,
        num_warps=num_warps,
    )
    return grad_x_TD, grad_delta_TD, partial_PD.sum(0).to(weight_D.dtype)


@triton.jit
def _add_norm(
    h_ptr,
    sum_ptr,
    inverse_ptr,
    x_ptr,
    delta_ptr,
    weight_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    KEEPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = row * D + d
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    if ADDS:
        delta = tl.load(delta_ptr + at, inside, 0.0).to(tl.float32)
        rounded = (x + delta).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, inside)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    if KEEPS:
        tl.store(inverse_ptr + row, inverse)
    weight = tl.load(weight_ptr + d, inside, 0.0).to(tl.float32)
    tl.store(h_ptr + at, (x * inverse * weight).to(h_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _add_norm_backward(
    grad_x_ptr,
    grad_delta_ptr,
    partial_ptr,
    grad_h_ptr,
    grad_sum_ptr,
    sum_ptr,
    inverse_ptr,
    weight_ptr,
    num_rows,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    at_partial = row * D
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + d, inside, 0.0).to(tl.float32)
    partial = tl.zeros([BLOCK], tl.float32)
    while row < num_rows:
        at = row * D + d
        inverse = tl.load(inverse_ptr + row)
        normed = tl.load(sum_ptr + at, inside, 0.0).to(tl.float32) * inverse
        grad_h = tl.load(grad_h_ptr + at, inside, 0.0).to(tl.float32)
        partial += grad_h * normed
        grad = grad_h * weight
        grad = (grad - normed * (tl.sum(grad * normed, 0) / D)) * inverse
        if ADDS:
            grad += tl.load(grad_sum_ptr + at, inside, 0.0).to(tl.float32)
        tl.store(grad_x_ptr + at, grad.to(grad_x_ptr.dtype.element_ty), inside)
        if SPLITS:
            tl.store(grad_delta_ptr + at, grad.to(grad_delta_ptr.dtype.element_ty), inside)
        row += tl.num_programs(0)
    tl.store(partial_ptr + at_partial + d, partial, inside)
