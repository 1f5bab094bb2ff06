# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernels: the experts of a layer in generation, and their weighted sum in training.

None of the kernels has a gradient.

Grids depend on shapes only, so that a step can be captured. Sums are in fp32, in one order for a
token whatever the other tokens are. Torch's operators compute products and sums in fp64, between
which the activation is in fp32, and the products of many rows in 16 bits, which are faster there.

Shapes: T tokens, D hidden, E experts, K chosen for a token, N = T K assignments, F expert width,
I inputs and O outputs of a product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.models import expert_products
from tandem.models.expert_products import ExpertOrder, ExpertParts, compute, run_experts
from tandem.models.kernels.gate import differentiate, gate

_LARGEST_BLOCK = 64
"""The largest number of rows of a program of a product."""
_MANY_ROWS = 128
"""Torch's operator is faster if an expert has more rows than this on average."""
_BLOCK = 1024


def experts(
    h_TD: Tensor,
    expert_TK: Tensor,
    *,
    weight_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    is_part: bool = False,
) -> Tensor:
    """See ``operators.Operators.experts``."""
    if not torch.is_inference_mode_enabled() or h_TD.dtype == torch.float64:
        return run_experts(
            h_TD,
            expert_TK,
            weight_TK=weight_TK,
            gate_up_E2FD=gate_up_E2FD,
            down_EDF=down_EDF,
            parts=PARTS,
            is_part=is_part,
        )
    num_chosen = expert_TK.shape[1]
    order = order_by_expert(expert_TK.flatten(), len(gate_up_E2FD), is_part=is_part)
    if h_TD.element_size() == 2 and expert_TK.numel() > _MANY_ROWS * len(gate_up_E2FD):
        x_ND = h_TD.index_select(0, order.source_N // num_chosen)
        z_ND = compute(x_ND, gate_up_E2FD, down_EDF=down_EDF, stop_E=order.stop_E, gate=gate)
    else:
        gate_up_N2F = multiply(h_TD, gate_up_E2FD, order=order, num_chosen=num_chosen)
        z_ND = multiply(gate(gate_up_N2F), down_EDF, order=order)
    return combine(z_ND, order, weight_TK=weight_TK)


def order_by_expert(expert_N: Tensor, num_experts: int, *, is_part: bool = False) -> ExpertOrder:
    """See ``expert_products.order_by_expert``. Each program finds the places of one expert.

    The experts of other processes (``is_part``) have the place -1, and places behind the last stop
    the assignment 0.
    """
    if is_part:
        source_N, place_N = torch.zeros_like(expert_N), torch.full_like(expert_N, -1)
    else:
        source_N, place_N = torch.empty_like(expert_N), torch.empty_like(expert_N)
    stop_E = torch.empty(num_experts, dtype=torch.int32, device=expert_N.device)
    _order[(num_experts,)](
        source_N, place_N, stop_E, expert_N, len(expert_N), BLOCK=_BLOCK, num_warps=4
    )
    return ExpertOrder(source_N, place_N, stop_E)


def multiply(
    x: Tensor, weight_EOI: Tensor, *, order: ExpertOrder, num_chosen: int | None = None
) -> Tensor:
    """Return each row times the transposed matrix of its expert, (N, O).

    Args:
        x: (N, I), sorted by expert; with ``num_chosen``, the rows of the tokens, (T, I).
    """
    num_rows, (num_experts, outputs, inputs) = len(order.source_N), weight_EOI.shape
    y_NO = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    # An expert with more rows than the mean should still have one block, which reads its weights.
    rows = min(max(16, triton.next_power_of_2(2 * num_rows // num_experts)), _LARGEST_BLOCK)
    num_blocks = -(-num_rows // rows) + min(num_rows, num_experts)
    columns, depth, stages = (128, 64, 4) if x.element_size() == 2 else (64, 32, 3)
    _multiply[(num_blocks, -(-outputs // columns))](
        y_NO,
        x.contiguous(),
        weight_EOI.contiguous(),
        order.source_N,
        order.stop_E,
        NUM_EXPERTS=num_experts,
        EXPERTS=triton.next_power_of_2(num_experts),
        OUTPUTS=outputs,
        INPUTS=inputs,
        CHOSEN=num_chosen or 0,
        ROWS=rows,
        COLUMNS=columns,
        DEPTH=depth,
        num_warps=4,
        num_stages=stages,
    )
    return y_NO


def combine(z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor) -> Tensor:
    """See ``expert_products.combine``."""
    if z_ND.dtype == torch.float64:
        return expert_products.combine(z_ND, order, weight_TK=weight_TK)
    (num_tokens, num_chosen), hidden = weight_TK.shape, z_ND.shape[1]
    y_TD = torch.empty((num_tokens, hidden), dtype=z_ND.dtype, device=z_ND.device)
    _combine[(num_tokens, -(-hidden // _BLOCK))](
        y_TD,
        z_ND,
        order.place_N,
        weight_TK.contiguous(),
        HIDDEN=hidden,
        CHOSEN=num_chosen,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return y_TD


PARTS = ExpertParts(gate, combine, differentiate)
"""See ``operators.Operators.expert_parts``."""


@triton.jit
def _order(source_ptr, place_ptr, stop_ptr, expert_ptr, num_rows, BLOCK: tl.constexpr):
    mine = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    smaller = tl.zeros((BLOCK,), tl.int32)
    for offset in range(0, num_rows, BLOCK):
        inside = offset + at < num_rows
        expert = tl.load(expert_ptr + offset + at, inside, mine)
        smaller += (expert < mine).to(tl.int32)
    end = tl.sum(smaller, 0)
    for offset in range(0, num_rows, BLOCK):
        row = offset + at
        is_mine = (tl.load(expert_ptr + row, row < num_rows, -1) == mine).to(tl.int32)
        place = end + tl.cumsum(is_mine, 0) - 1
        tl.store(place_ptr + row, place, is_mine > 0)
        tl.store(source_ptr + place, row, is_mine > 0)
        end += tl.sum(is_mine, 0)
    tl.store(stop_ptr + mine, end)


@triton.jit
def _multiply(
    y_ptr,
    x_ptr,
    weight_ptr,
    source_ptr,
    stop_ptr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    # The expert of this block is the first one whose blocks end behind it.
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    stop = tl.load(stop_ptr + experts, is_expert, 0)
    start = tl.load(stop_ptr + experts - 1, is_expert & (experts > 0), 0)
    num_blocks = tl.where(is_expert, (stop - start + ROWS - 1) // ROWS, 0)
    blocks_end = tl.cumsum(num_blocks, 0)
    block = tl.program_id(0)
    expert = tl.sum(((blocks_end <= block) & is_expert).to(tl.int32), 0)
    if expert == NUM_EXPERTS:
        return
    is_mine = experts == expert
    first = tl.sum(tl.where(is_mine, start + (block - blocks_end + num_blocks) * ROWS, 0), 0)
    end = tl.sum(tl.where(is_mine, stop, 0), 0)

    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    has_row, has_column = row < end, column < OUTPUTS
    x_row = row
    if CHOSEN > 0:
        x_row = tl.load(source_ptr + row, has_row, 0) // CHOSEN
    matrix = weight_ptr + expert.to(tl.int64) * (OUTPUTS * INPUTS)
    y = tl.zeros((ROWS, COLUMNS), tl.float32)
    for offset in range(0, INPUTS, DEPTH):
        at = offset + tl.arange(0, DEPTH)
        has_input = at < INPUTS
        x_at = x_ptr + x_row[:, None] * INPUTS + at[None, :]
        x = tl.load(x_at, has_row[:, None] & has_input[None, :], 0.0)
        weight_at = matrix + column[:, None] * INPUTS + at[None, :]
        weight = tl.load(weight_at, has_column[:, None] & has_input[None, :], 0.0)
        y = tl.dot(x, tl.trans(weight), y, input_precision="ieee")
    y_at = y_ptr + row[:, None] * OUTPUTS + column[None, :]
    tl.store(y_at, y.to(y_ptr.dtype.element_ty), has_row[:, None] & has_column[None, :])


@triton.jit
def _combine(
    y_ptr,
    z_ptr,
    place_ptr,
    weight_ptr,
    HIDDEN: tl.constexpr,
    CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < HIDDEN
    y = tl.zeros((BLOCK,), tl.float32)
    for choice in range(CHOSEN):
        place = tl.load(place_ptr + token * CHOSEN + choice)
        weight = tl.load(weight_ptr + token * CHOSEN + choice)
        has_place = inside & (place >= 0)
        z = tl.load(z_ptr + place * HIDDEN + column, has_place, 0.0).to(tl.float32)
        y += weight * z
    tl.store(y_ptr + token * HIDDEN + column, y.to(y_ptr.dtype.element_ty), inside)
