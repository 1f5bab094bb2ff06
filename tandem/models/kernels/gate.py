# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton kernels: silu of the gate times the up projection in one pass, and its gradient.

Arithmetic is fp32 with one rounding at the end. The backward pass recomputes the silu. fp64 is not
supported.

Shapes: T tokens, F feed-forward or expert width, N assignments of tokens to experts.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024
"""The number of columns of a program, which computes a part of one row."""


def gate(gate_up_T2F: Tensor) -> Tensor:
    """See ``operators.Operators.gate``."""
    if torch.is_grad_enabled():
        return _Gate.apply(gate_up_T2F)
    return _forward(gate_up_T2F.contiguous())


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        gate_up_T2F = gate_up_T2F.contiguous()
        ctx.save_for_backward(gate_up_T2F)
        return _forward(gate_up_T2F)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        (gate_up_T2F,) = ctx.saved_tensors
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        num_rows, inner = grad_TF.shape
        _gate_backward.run(
            grad_gate_up_T2F,
            grad_TF.contiguous(),
            gate_up_T2F,
            INNER=inner,
            BLOCK=_BLOCK,
            grid=(num_rows, -(-inner // _BLOCK)),
            warmup=False,
        )
        return grad_gate_up_T2F


def _forward(gate_up_T2F: Tensor) -> Tensor:
    num_rows, inner = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
    y_TF = torch.empty((num_rows, inner), dtype=gate_up_T2F.dtype, device=gate_up_T2F.device)
    _gate.run(
        y_TF,
        gate_up_T2F,
        INNER=inner,
        BLOCK=_BLOCK,
        grid=(num_rows, -(-inner // _BLOCK)),
        warmup=False,
    )
    return y_TF


def differentiate(
    gate_up_N2F: Tensor, grad_NF: Tensor, *, weight_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See ``expert_products.differentiate``."""
    grad_gate_up_N2F, weighted_NF = torch.empty_like(gate_up_N2F), torch.empty_like(grad_NF)
    dots_N = torch.empty_like(weight_N)
    num_rows, inner = grad_NF.shape
    _differentiate.run(
        grad_gate_up_N2F,
        weighted_NF,
        dots_N,
        gate_up_N2F,
        grad_NF,
        weight_N,
        INNER=inner,
        BLOCK=_BLOCK,
        grid=(num_rows,),
        warmup=False,
    )
    return grad_gate_up_N2F, weighted_NF, dots_N


@triton.jit
def _gate(y_ptr, gate_up_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    at = row * (2 * INNER) + column
    gate = tl.load(gate_up_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, inside, 0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + row * INNER + column, y.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _derivatives(grad, gate, up):
    """Return the gradients of gate and up, and the silu of the gate."""
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * silu, silu


@triton.jit
def _gate_backward(
    grad_gate_up_ptr, grad_ptr, gate_up_ptr, INNER: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < INNER
    at = row * (2 * INNER) + column
    gate = tl.load(gate_up_ptr + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, inside, 0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * INNER + column, inside, 0.0).to(tl.float32)
    grad_gate, grad_up, _ = _derivatives(grad, gate, up)
    dtype = grad_gate_up_ptr.dtype.element_ty
    tl.store(grad_gate_up_ptr + at, grad_gate.to(dtype), inside)
    tl.store(grad_gate_up_ptr + at + INNER, grad_up.to(dtype), inside)


@triton.jit
def _differentiate(
    grad_gate_up_ptr,
    weighted_ptr,
    dots_ptr,
    gate_up_ptr,
    grad_ptr,
    weight_ptr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(weight_ptr + row)
    dtype = grad_gate_up_ptr.dtype.element_ty
    dots = tl.zeros([BLOCK], tl.float32)
    for offset in range(0, INNER, BLOCK):
        column = offset + tl.arange(0, BLOCK)
        inside = column < INNER
        at = row * (2 * INNER) + column
        gate = tl.load(gate_up_ptr + at, inside, 0.0).to(tl.float32)
        up = tl.load(gate_up_ptr + at + INNER, inside, 0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * INNER + column, inside, 0.0).to(tl.float32)
        grad_gate, grad_up, silu = _derivatives(grad * weight, gate, up)
        dots += grad * silu * up
        tl.store(weighted_ptr + row * INNER + column, (weight * silu * up).to(dtype), inside)
        tl.store(grad_gate_up_ptr + at, grad_gate.to(dtype), inside)
        tl.store(grad_gate_up_ptr + at + INNER, grad_up.to(dtype), inside)
    tl.store(dots_ptr + row, tl.sum(dots, 0))
