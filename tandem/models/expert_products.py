# SPDX-License-Identifier: Apache-2.0
"""The products of tokens with the matrices of their experts, and their gradients.

Tokens reach their experts by gathers whose gradients are gathers: there is no atomic addition, so
results repeat on accelerators. Sizes depend on T, K and E only; the host does not wait for the
device.

Shapes: T tokens, D hidden, E experts, K chosen for a token, N = T K assignments, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """The assignments sorted by expert.

    Attributes:
        source_N: the assignment at each place, int64.
        place_N: the place of each assignment, int64: the inverse permutation.
        stop_E: the place behind the last one of each expert, int32.
    """

    source_N: Tensor
    place_N: Tensor
    stop_E: Tensor


def run_experts(
    h_TD: Tensor,
    expert_TK: Tensor,
    *,
    weight_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    gate: Callable[[Tensor], Tensor],
    is_part: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, D).

    Args:
        gate: ``operators.Operators.gate``.
        is_part: whether there may be experts of other processes; see ``operators.Operators``.
    """
    num_experts = len(gate_up_E2FD)
    order = order_by_expert(expert_TK.flatten(), num_experts + is_part)
    x_ND, stop_E = spread(h_TD, order, num_chosen=expert_TK.shape[1]), order.stop_E[:num_experts]
    z_ND = compute(x_ND, gate_up_E2FD, down_EDF=down_EDF, stop_E=stop_E, gate=gate)
    if is_part:  # on accelerators, rows behind the last stop are not written
        is_behind_N = torch.arange(len(z_ND), device=z_ND.device) >= stop_E[-1]
        z_ND = z_ND.masked_fill(is_behind_N[:, None], 0)
    return combine(z_ND, order, weight_TK=weight_TK)


def order_by_expert(expert_N: Tensor, num_experts: int) -> ExpertOrder:
    """Return the order of the assignments; the host does not wait for the device."""
    source_N = expert_N.argsort(stable=True)
    place_N = torch.empty_like(source_N)
    place_N[source_N] = torch.arange(len(source_N), device=source_N.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=expert_N.device)
    counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N, dtype=torch.int32))
    return ExpertOrder(source_N, place_N, counts_E.cumsum(0, dtype=torch.int32))


def spread(h_TD: Tensor, order: ExpertOrder, *, num_chosen: int) -> Tensor:
    """Return the row of each assignment's token, (N, D), sorted by expert."""
    return _Spread.apply(h_TD, order.source_N, order.place_N, num_chosen)


def compute(
    x_ND: Tensor,
    gate_up_E2FD: Tensor,
    *,
    down_EDF: Tensor,
    stop_E: Tensor,
    gate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Return each expert's outputs for its rows, (N, D). The rows must end at the last stop."""
    gate_up_N2F = _multiply(x_ND, gate_up_E2FD, stop_E=stop_E)
    return _multiply(gate(gate_up_N2F), down_EDF, stop_E=stop_E)


def _multiply(x_NI: Tensor, weight_EOI: Tensor, *, stop_E: Tensor) -> Tensor:
    """Return each row times the transposed matrix of its expert, (N, O)."""
    if x_NI.dtype != torch.float64:
        return F.grouped_mm(x_NI, weight_EOI.transpose(1, 2), offs=stop_E)
    # grouped_mm has no fp64.
    parts = x_NI.split(stop_E.diff(prepend=stop_E.new_zeros(1)).tolist())
    return torch.cat([F.linear(*pair) for pair in zip(parts, weight_EOI, strict=True)])


def combine(z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs, (T, D), added in fp32."""
    z_TKD = collect(z_ND, order).unflatten(0, weight_TK.shape)
    return (z_TKD * weight_TK[..., None]).sum(1).to(z_ND.dtype)


def collect(z_ND: Tensor, order: ExpertOrder) -> Tensor:
    """Return rows of places, (N, D), in the order of the assignments."""
    return _Collect.apply(z_ND, order.source_N, order.place_N)


class _Spread(torch.autograd.Function):
    """Rows of tokens at the places of their assignments. The gradient is a gather and a sum."""

    @staticmethod
    def forward(
        ctx: Any, h_TD: Tensor, source_N: Tensor, place_N: Tensor, num_chosen: int
    ) -> Tensor:
        ctx.save_for_backward(place_N)
        ctx.num_chosen = num_chosen
        return h_TD.index_select(0, source_N // num_chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        (place_N,) = ctx.saved_tensors
        grad_TKD = grad_ND.index_select(0, place_N).unflatten(0, (-1, ctx.num_chosen))
        wide = torch.promote_types(grad_ND.dtype, torch.float32)
        return grad_TKD.sum(1, dtype=wide).to(grad_ND.dtype), None, None, None


class _Collect(torch.autograd.Function):
    """Rows of places, in the order of assignments. The gradient is the opposite gather."""

    @staticmethod
    def forward(ctx: Any, z_ND: Tensor, source_N: Tensor, place_N: Tensor) -> Tensor:
        ctx.save_for_backward(source_N)
        return z_ND.index_select(0, place_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        (source_N,) = ctx.saved_tensors
        return grad_ND.index_select(0, source_N), None, None
