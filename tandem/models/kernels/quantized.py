# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernels of ``quantized_operators``: they apply the scales of a product and quantize again.

Arithmetic is fp32. A program quantizes a whole token, because the scale is that of its largest
number. The sum of the residual stream is rounded to its dtype before the norm.

Shapes: as in ``quantized_operators``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models.quantized_operators import (
    LARGEST,
    SMALLEST_SCALE,
    HeadLayout,
    Product,
    QuantizedOperators,
    QuantizedTokens,
    empty_tokens,
)

_PAIRS_PER_PROGRAM = 512
_COLUMNS = 32768
"""The most columns that a program of ``_gate`` holds at once; of more, it computes each twice."""


def add_norm(
    x_TD: Tensor, delta: Tensor | Product | None, *, weight_D: Tensor, eps: float
) -> tuple[QuantizedTokens, Tensor]:
    """See ``QuantizedOperators.add_norm``."""
    h = empty_tokens(*x_TD.shape, device=x_TD.device)
    sum_TD = x_TD if delta is None else torch.empty_like(x_TD)
    outputs = _NormOutputs(h.values_TK, h.scale_T, sum_TD)
    _launch_norm(outputs, x_TD, delta=delta, weight_D=weight_D, eps=eps)
    return h, sum_TD


def last_norm(x_TD: Tensor, delta: Product, *, weight_D: Tensor, eps: float) -> Tensor:
    """See ``QuantizedOperators.last_norm``."""
    h_TD = torch.empty_like(x_TD, dtype=weight_D.dtype)
    _launch_norm(_NormOutputs(h_TD, None, None), x_TD, delta=delta, weight_D=weight_D, eps=eps)
    return h_TD


@dataclass(frozen=True, slots=True)
class _NormOutputs:
    """The tensors that ``_add_norm`` writes: the norm, and its scales and the sum unless None."""

    h_TD: Tensor
    scale_T: Tensor | None
    sum_TD: Tensor | None


def _launch_norm(
    outputs: _NormOutputs,
    x_TD: Tensor,
    *,
    delta: Tensor | Product | None,
    weight_D: Tensor,
    eps: float,
) -> None:
    num_rows, hidden = x_TD.shape
    block = triton.next_power_of_2(hidden)
    h_TD, scale_T, sum_TD = outputs.h_TD, outputs.scale_T, outputs.sum_TD
    product = delta if isinstance(delta, Product) else None
    added_TD = x_TD if delta is None else delta.raw_TN if isinstance(delta, Product) else delta
    _add_norm[(num_rows,)](
        h_TD,
        h_TD if scale_T is None else scale_T,
        h_TD if sum_TD is None else sum_TD,
        x_TD.contiguous(),
        added_TD.contiguous(),
        x_TD if product is None else product.scale_T,
        weight_D,
        eps,
        D=hidden,
        BLOCK=block,
        ADDS=delta is not None,
        SCALED=product is not None,
        QUANTIZES=scale_T is not None,
        KEEPS=sum_TD is not None and delta is not None,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        num_warps=min(max(block // 256, 1), 16),
    )


def heads(product: Product, layout: HeadLayout, *, angles: tuple[Tensor, Tensor]) -> Tensor:
    """See ``QuantizedOperators.heads``."""
    cos_T1E, sin_T1E = angles
    num_tokens, head_dim = len(product.raw_TN), layout.head_dim
    num_heads = layout.num_heads + 2 * layout.num_kv_heads
    pairs = triton.next_power_of_2(head_dim // 2)
    rows = max(_PAIRS_PER_PROGRAM // pairs, 1)
    y_TME = torch.empty(
        (num_tokens, num_heads, head_dim), dtype=cos_T1E.dtype, device=cos_T1E.device
    )
    raw_TN, bias_N, q_norm_E = product.raw_TN, layout.bias_N, layout.q_norm_E
    _heads[(triton.cdiv(num_tokens * num_heads, rows),)](
        y_TME,
        raw_TN,
        product.scale_T,
        raw_TN if bias_N is None else bias_N,
        raw_TN if q_norm_E is None else q_norm_E,
        raw_TN if layout.k_norm_E is None else layout.k_norm_E,
        cos_T1E.contiguous(),
        sin_T1E.contiguous(),
        num_tokens * num_heads,
        layout.eps,
        HEADS=num_heads,
        Q_HEADS=layout.num_heads,
        KV_HEADS=layout.num_kv_heads,
        HEAD_DIM=head_dim,
        ROWS=rows,
        PAIRS=pairs,
        BIASED=bias_N is not None,
        NORMED=q_norm_E is not None,
        num_warps=4,
    )
    return y_TME


def gate(product: Product, *, max_columns: int = _COLUMNS) -> QuantizedTokens:
    """See ``QuantizedOperators.gate``.

    Args:
        max_columns: the most columns of a program, a power of two.
    """
    num_tokens, inner = product.raw_TN.shape[0], product.raw_TN.shape[1] // 2
    y = empty_tokens(num_tokens, inner, device=product.raw_TN.device)
    block = min(triton.next_power_of_2(inner), max_columns)
    _gate[(num_tokens,)](
        y.values_TK,
        y.scale_T,
        product.raw_TN,
        product.scale_T,
        INNER=inner,
        BLOCK=block,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST_SCALE,
        num_warps=4 if block <= 16384 else 8,
    )
    return y


TRITON_QUANTIZED = QuantizedOperators(add_norm, last_norm, heads, gate)


@triton.jit
def _store_quantized(values_ptr, x, inverse, inside, LARGEST: tl.constexpr):
    """Store numbers divided by their scale. The largest may exceed the range by a rounding."""
    scaled = tl.minimum(tl.maximum(x * inverse, -LARGEST), LARGEST)
    tl.store(values_ptr, scaled.to(values_ptr.dtype.element_ty), inside)


@triton.jit
def _add_norm(
    h_ptr,
    h_scale_ptr,
    sum_ptr,
    x_ptr,
    delta_ptr,
    delta_scale_ptr,
    weight_ptr,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDS: tl.constexpr,
    SCALED: tl.constexpr,
    QUANTIZES: tl.constexpr,
    KEEPS: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    at = row * D + d
    x = tl.load(x_ptr + at, inside, 0.0).to(tl.float32)
    if ADDS:
        delta = tl.load(delta_ptr + at, inside, 0.0).to(tl.float32)
        if SCALED:
            delta *= tl.load(delta_scale_ptr + row)
        rounded = (x + delta).to(x_ptr.dtype.element_ty)
        if KEEPS:
            tl.store(sum_ptr + at, rounded, inside)
        x = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    h = x * inverse * tl.load(weight_ptr + d, inside, 0.0).to(tl.float32)
    if QUANTIZES:
        scale = tl.maximum(tl.max(tl.abs(h), 0) / LARGEST, SMALLEST)
        tl.store(h_scale_ptr + row, scale)
        _store_quantized(h_ptr + at, h, 1.0 / scale, inside, LARGEST)
    else:
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), inside)


@triton.jit(do_not_specialize=["num_rows"])
def _heads(
    y_ptr,
    raw_ptr,
    scale_ptr,
    bias_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    num_rows,
    eps,
    HEADS: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    BIASED: tl.constexpr,
    NORMED: tl.constexpr,
):
    # A row is one head of one token. The heads after those of query and key are values.
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    inside = (row < num_rows) & (pair < HALF)
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    column = head * HEAD_DIM + pair
    at = token * (HEADS * HEAD_DIM) + column
    scale = tl.load(scale_ptr + token, row < num_rows, 0.0)
    x_1 = tl.load(raw_ptr + at, inside, 0.0).to(tl.float32) * scale
    x_2 = tl.load(raw_ptr + at + HALF, inside, 0.0).to(tl.float32) * scale
    if BIASED:
        x_1 += tl.load(bias_ptr + column, inside, 0.0).to(tl.float32)
        x_2 += tl.load(bias_ptr + column + HALF, inside, 0.0).to(tl.float32)
    rotates = inside & (head < Q_HEADS + KV_HEADS)
    if NORMED:
        inverse = tl.rsqrt((tl.sum(x_1 * x_1 + x_2 * x_2, 1) / HEAD_DIM)[:, None] + eps)
        of_q, of_k = rotates & (head < Q_HEADS), rotates & (head >= Q_HEADS)
        weight_1 = tl.load(q_norm_ptr + pair, of_q, 0.0).to(tl.float32)
        weight_1 += tl.load(k_norm_ptr + pair, of_k, 0.0).to(tl.float32)
        weight_2 = tl.load(q_norm_ptr + pair + HALF, of_q, 0.0).to(tl.float32)
        weight_2 += tl.load(k_norm_ptr + pair + HALF, of_k, 0.0).to(tl.float32)
        x_1 = tl.where(rotates, x_1 * inverse * weight_1, x_1)
        x_2 = tl.where(rotates, x_2 * inverse * weight_2, x_2)
    angle = token * HEAD_DIM + pair
    cos_1 = tl.load(cos_ptr + angle, rotates, 1.0).to(tl.float32)
    cos_2 = tl.load(cos_ptr + angle + HALF, rotates, 1.0).to(tl.float32)
    sin_1 = tl.load(sin_ptr + angle, rotates, 0.0).to(tl.float32)
    sin_2 = tl.load(sin_ptr + angle + HALF, rotates, 0.0).to(tl.float32)
    y_1 = x_1 * cos_1 + x_2 * sin_1
    y_2 = x_2 * cos_2 + x_1 * sin_2
    tl.store(y_ptr + at, y_1.to(y_ptr.dtype.element_ty), inside)
    tl.store(y_ptr + at + HALF, y_2.to(y_ptr.dtype.element_ty), inside)


@triton.jit
def _gated(raw_ptr, row, column, inside, raw_scale, INNER: tl.constexpr):
    at = raw_ptr + row * (2 * INNER) + column
    gate = tl.load(at, inside, 0.0).to(tl.float32) * raw_scale
    up = tl.load(at + INNER, inside, 0.0).to(tl.float32) * raw_scale
    return gate * tl.sigmoid(gate) * up


@triton.jit
def _gate(
    values_ptr,
    scale_ptr,
    raw_ptr,
    raw_scale_ptr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    raw_scale = tl.load(raw_scale_ptr + row)
    lane = tl.arange(0, BLOCK)
    values_ptr += row * INNER
    if BLOCK >= INNER:
        y = _gated(raw_ptr, row, lane, lane < INNER, raw_scale, INNER)
        scale = tl.maximum(tl.max(tl.abs(y), 0) / LARGEST, SMALLEST)
        _store_quantized(values_ptr + lane, y, 1.0 / scale, lane < INNER, LARGEST)
    else:
        largest = tl.zeros([BLOCK], tl.float32)
        for start in range(0, INNER, BLOCK):
            column = start + lane
            y = _gated(raw_ptr, row, column, column < INNER, raw_scale, INNER)
            largest = tl.maximum(largest, tl.abs(y))
        scale = tl.maximum(tl.max(largest, 0) / LARGEST, SMALLEST)
        for start in range(0, INNER, BLOCK):
            column = start + lane
            y = _gated(raw_ptr, row, column, column < INNER, raw_scale, INNER)
            _store_quantized(values_ptr + column, y, 1.0 / scale, column < INNER, LARGEST)
    tl.store(scale_ptr + row, scale)
