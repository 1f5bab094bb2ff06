# SPDX-License-Identifier: Apache-2.0
"""The products of tokens with the matrices of their experts, and their gradients.

Gradients of gathers are gathers, without atomic addition, so that results repeat. Sizes depend on
T, K and E only: the host does not wait for the device. For its backward pass, a layer keeps tokens
and the gate and up projections of their experts, and rows that come from other processes. It
repeats gathers and the activation, and no product.

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
    """The weighted sum of each token's outputs, without gradient."""

    def __call__(self, z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor) -> Tensor:
        """Return the sums (T, D), added in fp32 and rounded once."""
        ...


class Differentiate(Protocol):
    """The type of ``differentiate``, with the activation of the device."""

    def __call__(
        self, gate_up_N2F: Tensor, grad_NF: Tensor, *, weight_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class ExpertParts:
    """The operations between the products of experts, which a device may compute in its own way."""

    gate: Gate
    combine: Combine
    differentiate: Differentiate


def run_experts(
    h_TD: Tensor,
    expert_TK: Tensor,
    *,
    weight_TK: Tensor,
    gate_up_E2FD: Tensor,
    down_EDF: Tensor,
    parts: ExpertParts,
    is_part: bool = False,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, (T, D).

    Args:
        is_part: whether there may be experts of other processes; see ``operators.Operators``. There
            are no gradients then.
    """
    num_experts, num_chosen = len(gate_up_E2FD), expert_TK.shape[1]
    order = order_by_expert(expert_TK.flatten(), num_experts + is_part)
    if not is_part:
        way = (order, _Work(num_chosen, parts))
        gate_up_N2F = _Up.apply(h_TD, gate_up_E2FD, way)
        return _Down.apply(gate_up_N2F, down_EDF, weight_TK, way)
    x_ND, stop_E = h_TD.index_select(0, order.source_N // num_chosen), order.stop_E[:num_experts]
    z_ND = compute(x_ND, gate_up_E2FD, down_EDF=down_EDF, stop_E=stop_E, gate=parts.gate)
    # On accelerators, rows behind the last stop are not written.
    is_behind_N = torch.arange(len(z_ND), device=z_ND.device) >= stop_E[-1]
    z_ND = z_ND.masked_fill(is_behind_N[:, None], 0)
    return combine(z_ND, order, weight_TK=weight_TK)


@dataclass(frozen=True, slots=True)
class Matrices:
    """The matrices of the experts of a layer."""

    gate_up_E2FD: Tensor
    down_EDF: Tensor


def order_by_expert(expert_N: Tensor, num_experts: int) -> ExpertOrder:
    """Return the order of the assignments; the host does not wait for the device."""
    source_N = expert_N.argsort(stable=True)
    place_N = torch.empty_like(source_N)
    place_N[source_N] = torch.arange(len(source_N), device=source_N.device)
    counts_E = torch.zeros(num_experts, dtype=torch.int32, device=expert_N.device)
    counts_E.scatter_add_(0, expert_N, torch.ones_like(expert_N, dtype=torch.int32))
    return ExpertOrder(source_N, place_N, counts_E.cumsum(0, dtype=torch.int32))


def spread(h_TD: Tensor, order: ExpertOrder, *, num_chosen: int, parts: ExpertParts) -> Tensor:
    """Return the row of each assignment's token, (N, D), sorted by expert, with gradient."""
    return _Spread.apply(h_TD, (order, _Work(num_chosen, parts)))


def gather_weights(weight_TK: Tensor, order: ExpertOrder) -> Tensor:
    """Return the weight of each assignment, (N, 1), sorted by expert, with gradient."""
    return _Gathered.apply(weight_TK, order)


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
    z_TKD = z_ND.index_select(0, order.place_N).unflatten(0, weight_TK.shape)
    return (z_TKD * weight_TK[..., None]).sum(1).to(z_ND.dtype)


def differentiate(
    gate_up_N2F: Tensor, grad_NF: Tensor, *, weight_N: Tensor, gate: Gate
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values for the backward pass of the activation a of gate and up times its weight w.

    Args:
        grad_NF: the gradient of w a.
        weight_N: w, in at least fp32.

    Returns:
        The gradient of gate and up, (N, 2 F); w a, (N, F); and the gradients of the weights, (N,).
    """
    dtype = gate_up_N2F.dtype
    # ``a_NF`` requires a gradient, but a backward pass records no graph.
    with torch.enable_grad():
        leaf_N2F = gate_up_N2F.detach().requires_grad_()
        a_NF = gate(leaf_N2F)
    dots_N = grad_NF.to(weight_N.dtype, copy=True).mul_(a_NF.detach()).sum(1)
    grad_a_NF = (grad_NF * weight_N[:, None]).to(dtype)
    (grad_N2F,) = torch.autograd.grad(a_NF, leaf_N2F, grad_a_NF)
    del grad_a_NF  # each of these is as large as an activation
    return grad_N2F, (a_NF.detach() * weight_N[:, None]).to(dtype), dots_N


def train_part(
    x_MD: Tensor, order: ExpertOrder, *, weight_M1: Tensor, matrices: Matrices, parts: ExpertParts
) -> Tensor:
    """Return the output of each row's expert, (M, D), in the order of the rows.

    The weights enter in the backward pass only; see ``combine_rows``.
    """
    way = (order, _Work(1, parts, weighs_elsewhere=True))
    gate_up_M2F = _Up.apply(x_MD, matrices.gate_up_E2FD, way)
    return _Down.apply(gate_up_M2F, matrices.down_EDF, weight_M1, way)


def combine_rows(
    z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor, parts: ExpertParts
) -> Tensor:
    """Return the weighted sum of each token's rows, (T, D), which ``train_part`` has computed.

    The gradient of a row is that of its token, without the weight. ``train_part`` multiplies by the
    weight, and computes the gradient of the weight, for which the rows would have to be kept here.
    """
    return _CombineRows.apply(z_ND, weight_TK, (order, _Work(weight_TK.shape[1], parts)))


@dataclass(frozen=True, slots=True)
class _Work:
    """The work on an order.

    Attributes:
        num_chosen: K.
        weighs_elsewhere: whether another process multiplies the outputs by their weights.
    """

    num_chosen: int
    parts: ExpertParts
    weighs_elsewhere: bool = False


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
        z_ND = _multiply(ctx.work.parts.gate(gate_up_N2F), weight_EDF, stop_E=order.stop_E)
        if ctx.work.weighs_elsewhere:
            return _add_rows(z_ND, order, work=ctx.work)
        return ctx.work.parts.combine(z_ND, order, weight_TK=weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        gate_up_N2F, weight_EDF, weight_TK, *saved = ctx.saved_tensors
        order, grad_EDF = ExpertOrder(*saved), None
        grad_ND = grad_TD.index_select(0, order.source_N // ctx.work.num_chosen)
        grad_NF = _multiply(grad_ND, weight_EDF.transpose(1, 2), stop_E=order.stop_E)
        if not ctx.needs_input_grad[1]:
            del grad_ND
        weight_N = weight_TK.flatten()[order.source_N]
        grad_N2F, weighted_NF, dots_N = ctx.work.parts.differentiate(
            gate_up_N2F, grad_NF, weight_N=weight_N
        )
        del grad_NF
        if ctx.needs_input_grad[1]:
            grad_EDF = _outer(grad_ND, weighted_NF, stop_E=order.stop_E)
        return grad_N2F, grad_EDF, dots_N[order.place_N].view_as(weight_TK), None


def _add_rows(x_ND: Tensor, order: ExpertOrder, *, work: _Work) -> Tensor:
    """Return the sum of each token's rows, (T, D)."""
    if work.num_chosen == 1:
        return x_ND.index_select(0, order.place_N)
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    size = (len(x_ND) // work.num_chosen, work.num_chosen)
    return work.parts.combine(x_ND, order, weight_TK=x_ND.new_ones(size, dtype=wide))


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
    def forward(ctx: Any, h_TD: Tensor, way: _Way) -> Tensor:
        order, ctx.work = way
        ctx.save_for_backward(*order)
        return h_TD.index_select(0, order.source_N // ctx.work.num_chosen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ND: Tensor) -> Any:
        return _add_rows(grad_ND, ExpertOrder(*ctx.saved_tensors), work=ctx.work), None


class _Gathered(torch.autograd.Function):
    """Weights at the places of their assignments. The gradient is the opposite gather."""

    @staticmethod
    def forward(ctx: Any, weight_TK: Tensor, order: ExpertOrder) -> Tensor:
        ctx.save_for_backward(order.place_N)
        ctx.shape = weight_TK.shape
        return weight_TK.flatten()[order.source_N, None]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_N1: Tensor) -> Any:
        (place_N,) = ctx.saved_tensors
        return grad_N1[place_N].view(ctx.shape), None


class _CombineRows(torch.autograd.Function):
    """See ``combine_rows``."""

    @staticmethod
    def forward(ctx: Any, z_ND: Tensor, weight_TK: Tensor, way: _Way) -> Tensor:
        order, ctx.work = way
        ctx.save_for_backward(order.source_N)
        return ctx.work.parts.combine(z_ND, order, weight_TK=weight_TK)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TD: Tensor) -> Any:
        (source_N,) = ctx.saved_tensors
        return grad_TD.index_select(0, source_N // ctx.work.num_chosen), None, None
