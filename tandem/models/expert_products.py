# SPDX-License-Identifier: Apache-2.0
"""The products of tokens with the matrices of their experts, and their gradients.

Gradients of gathers are gathers, without atomic addition, so that results repeat. Sizes depend on
T, K and E only: the host does not wait for the device. For its backward pass, a layer keeps tokens
and the gate and up projections of their experts, and rows that travel between processes. It repeats
gathers and the activation, and no product.

Shapes: T tokens, D hidden, E experts, K chosen for a token, N = T K assignments, F expert width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812


class ExpertOrder(NamedTuple):
    """The assignments sorted by expert.

    Attributes:
        source_N: the assignment at each place, int64.
        place_N: the place of each assignment, int64: the inverse permutation.
        stop_E: the place behind the last one of each expert, int32.
    """

    source_N: Tensor
    place_N: Tensor
    stop_E: Tensor


Gate = Callable[[Tensor], Tensor]
"""``operators.Operators.gate``."""


class Combine(Protocol):
    """The weighted sum of each token's outputs."""

    def __call__(self, z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor) -> Tensor:
        """Return the sums (T, D), added in fp32 and rounded once."""
        ...


def run_experts(
    h_TD: Tensor,
    expert_TK: Tensor,
    *,
    weight_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    gate: Gate,
    is_part: bool = False,
    add: Combine | None = None,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, D).

    Args:
        is_part: whether there may be experts of other processes; see ``operators.Operators``. There
            are no gradients then.
        add: a faster ``combine``, which needs no gradient.
    """
    num_experts, num_chosen = len(gate_up_E2FD), expert_TK.shape[1]
    order = order_by_expert(expert_TK.flatten(), num_experts + is_part)
    if not is_part:
        way = (order, _Work(num_chosen, gate, add or combine))
        gate_up_N2F = _Up.apply(h_TD, gate_up_E2FD, way)
        return _Down.apply(gate_up_N2F, down_EDF, weight_TK, way)
    x_ND, stop_E = spread(h_TD, order, num_chosen=num_chosen), order.stop_E[:num_experts]
    z_ND = compute(x_ND, gate_up_E2FD, down_EDF=down_EDF, stop_E=stop_E, gate=gate)
    # On accelerators, rows behind the last stop are not written.
    is_behind_N = torch.arange(len(z_ND), device=z_ND.device) >= stop_E[-1]
    z_ND = z_ND.masked_fill(is_behind_N[:, None], 0)
    return combine(z_ND, order, weight_TK=weight_TK)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of the experts of a layer, with their activation."""

    gate_up_E2FD: Tensor
    down_EDF: Tensor
    gate: Gate


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
    gate: Gate,
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


def train_part(x_MD: Tensor, order: ExpertOrder, *, matrices: Matrices) -> Tensor:
    """Return the output of each row's expert, (M, D), in the order of the rows, with gradients."""
    way = (order, _Work(1, matrices.gate, combine))
    gate_up_M2F = _Up.apply(x_MD, matrices.gate_up_E2FD, way)
    return collect(_Out.apply(gate_up_M2F, matrices.down_EDF, way), order)


@dataclass(frozen=True, slots=True)
class _Work:
    """The activation of experts, and the sums of a token's rows."""

    num_chosen: int
    gate: Gate
    add: Combine


_Way = tuple[ExpertOrder, _Work]
"""The order of a pass, and the work on it. The order is saved for the backward pass like any other
tensor, because the router of a recomputed layer may choose other experts."""


class _Up(torch.autograd.Function):
    """Each assignment's token times gate and up of its expert, (N, 2 F). It keeps the tokens."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, weight_E2FD: Tensor, way: _Way) -> Tensor:
        order, ctx.work = way
        ctx.save_for_backward(h_TD, weight_E2FD, *order)
        x_ND = h_TD.index_select(0, order.source_N // ctx.work.num_chosen)
        return _multiply(x_ND, weight_E2FD, stop_E=order.stop_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N2F: Tensor) -> Any:
        h_TD, weight_E2FD, *saved = ctx.saved_tensors
        order, grad_TD, grad_E2FD = ExpertOrder(*saved), None, None
        if ctx.needs_input_grad[1]:
            x_ND = h_TD.index_select(0, order.source_N // ctx.work.num_chosen)
            grad_E2FD = _outer(grad_N2F, x_ND, stop_E=order.stop_E)
            del x_ND
        if ctx.needs_input_grad[0]:
            grad_ND = _multiply(grad_N2F, weight_E2FD.transpose(1, 2), stop_E=order.stop_E)
            grad_TD = _add_rows(grad_ND, order, work=ctx.work)
        return grad_TD, grad_E2FD, None


class _Down(torch.autograd.Function):
    """The weighted sum of the outputs of experts from gate and up, (T, D). It keeps gate and up.

    With a = gate(gate_up), z = W a and y = sum w z, and a gradient g of y at each assignment:
    dw = a . (W^T g), da = w W^T g and dW = g (w a)^T. So z is not needed.
    """

    @staticmethod
    def forward(
        ctx: Any, gate_up_N2F: Tensor, weight_EDF: Tensor, weight_TK: Tensor, way: _Way
    ) -> Tensor:
        order, ctx.work = way
        ctx.save_for_backward(gate_up_N2F, weight_EDF, weight_TK, *order)
        z_ND = _multiply(ctx.work.gate(gate_up_N2F), weight_EDF, stop_E=order.stop_E)
        return ctx.work.add(z_ND, order, weight_TK=weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        gate_up_N2F, weight_EDF, weight_TK, *saved = ctx.saved_tensors
        order, dtype = ExpertOrder(*saved), gate_up_N2F.dtype
        needs_gate_up, needs_matrix, needs_weight = ctx.needs_input_grad[:3]
        grad_N2F = grad_EDF = grad_TK = None
        # ``a_NF`` requires a gradient, but a backward pass records no graph.
        leaf_N2F, a_NF = _activate_again(gate_up_N2F, ctx.work)
        weight_N1 = weight_TK.flatten()[order.source_N, None]
        grad_ND = grad_TD.index_select(0, order.source_N // ctx.work.num_chosen)
        if needs_matrix:
            weighted_NF = (a_NF * weight_N1).to(dtype)
            grad_EDF = _outer(grad_ND, weighted_NF, stop_E=order.stop_E)
            del weighted_NF
        if needs_gate_up or needs_weight:
            back_NF = _multiply(grad_ND, weight_EDF.transpose(1, 2), stop_E=order.stop_E)
            del grad_ND
            if needs_weight:
                dots_N = (back_NF.to(weight_TK.dtype) * a_NF).sum(1)
                grad_TK = dots_N[order.place_N].view_as(weight_TK)
            if needs_gate_up:
                grad_NF = (back_NF * weight_N1).to(dtype)
                del back_NF
                (grad_N2F,) = torch.autograd.grad(a_NF, leaf_N2F, grad_NF)
        return grad_N2F, grad_EDF, grad_TK, None


class _Out(torch.autograd.Function):
    """The outputs of experts from gate and up, (N, D), sorted by expert. It keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate_up_N2F: Tensor, weight_EDF: Tensor, way: _Way) -> Tensor:
        order, ctx.work = way
        ctx.save_for_backward(gate_up_N2F, weight_EDF, order.stop_E)
        return _multiply(ctx.work.gate(gate_up_N2F), weight_EDF, stop_E=order.stop_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        gate_up_N2F, weight_EDF, stop_E = ctx.saved_tensors
        grad_N2F = grad_EDF = None
        leaf_N2F, a_NF = _activate_again(gate_up_N2F, ctx.work)
        if ctx.needs_input_grad[1]:
            grad_EDF = _outer(grad_ND, a_NF, stop_E=stop_E)
        if ctx.needs_input_grad[0]:
            grad_NF = _multiply(grad_ND, weight_EDF.transpose(1, 2), stop_E=stop_E)
            (grad_N2F,) = torch.autograd.grad(a_NF, leaf_N2F, grad_NF)
        return grad_N2F, grad_EDF, None


def _add_rows(grad_ND: Tensor, order: ExpertOrder, *, work: _Work) -> Tensor:
    """Return the sum of the gradients of each token's rows, (T, D)."""
    if work.num_chosen == 1:
        return grad_ND.index_select(0, order.place_N)
    wide = torch.promote_types(grad_ND.dtype, torch.float32)
    size = (len(grad_ND) // work.num_chosen, work.num_chosen)
    return work.add(grad_ND, order, weight_TK=grad_ND.new_ones(size, dtype=wide))


def _activate_again(gate_up_N2F: Tensor, work: _Work) -> tuple[Tensor, Tensor]:
    """Return gate and up as a leaf of a graph, and their activation."""
    with torch.enable_grad():
        leaf_N2F = gate_up_N2F.detach().requires_grad_()
        return leaf_N2F, work.gate(leaf_N2F)


def _outer(y_NO: Tensor, x_NI: Tensor, *, stop_E: Tensor) -> Tensor:
    """Return the sum of the outer products of each expert's rows, (E, O, I)."""
    if x_NI.dtype != torch.float64:
        return F.grouped_mm(y_NO.T, x_NI, offs=stop_E)
    sizes = stop_E.diff(prepend=stop_E.new_zeros(1)).tolist()
    parts = zip(y_NO.split(sizes), x_NI.split(sizes), strict=True)
    return torch.stack([y.T @ x for y, x in parts])


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
