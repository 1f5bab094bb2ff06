# SPDX-License-Identifier: Apache-2.0
"""The feed-forward with experts: a router, routed experts, and an expert that computes all tokens.

Trainer and rollout share it. The router's product is in fp32 in both, because in bf16 the last
chosen expert and the first rejected one are often equal. Tokens reach their experts by gathers
whose gradients are gathers: there is no atomic addition, so results repeat on accelerators. Sizes
depend on T, K and E only, so a step can be captured. No token is dropped, and there is no auxiliary
loss.

Shapes: T tokens, D hidden, E experts, K chosen for a token, N = T K assignments, F expert width,
S width of the shared expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig

Choose = Callable[[Tensor], Tensor]
"""A function from the experts that a router chose, int64 (T, K), to those that compute."""
_CORRECTION = ".correction"
_EPSILON = 1e-20
"""The number that DeepSeek's code adds to the sum of the weights before it divides by it."""


class Experts(nn.Module):
    """The feed-forward of a layer with experts, without biases.

    Attributes:
        router: (E, D).
        gate_up, down: (E, 2 F, D) and (E, D, F), all experts.
        correction: (E) in fp32, which training never changes; None without one.
        shared_gate_up, shared_down, shared_gate: (2 S, D), (D, S) and (1, D); None without them.
    """

    def __init__(self, config: ExpertConfig, hidden: int) -> None:
        super().__init__()
        self.config = config
        experts, inner, shared = config.num_experts, config.inner, config.shared_inner
        self.router = nn.Parameter(torch.empty(experts, hidden))
        self.correction: nn.Parameter | None = None
        if config.has_correction:
            wide = torch.empty(experts, dtype=torch.float32)
            self.correction = nn.Parameter(wide, requires_grad=False)
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner))
        self.shared_gate_up = _parameter(2 * shared, hidden) if shared else None
        self.shared_down = _parameter(hidden, shared) if shared else None
        self.shared_gate = _parameter(1, hidden) if config.has_shared_gate else None

    def forward(
        self, h_TD: Tensor, gate: Callable[[Tensor], Tensor], *, choose: Choose | None = None
    ) -> Tensor:
        """Return the outputs (T, D) for the normed inputs.

        Args:
            gate: ``Operators.gate``.
            choose: the function from the router's choice to the experts that compute.
        """
        expert_TK, weight_TK = route(
            h_TD, self.router, config=self.config, correction_E=self.correction, choose=choose
        )
        order = order_by_expert(expert_TK.flatten(), self.config.num_experts)
        x_ND = spread(h_TD, order, num_chosen=self.config.num_chosen)
        z_ND = compute(x_ND, self.gate_up, down_EDF=self.down, stop_E=order.stop_E, gate=gate)
        y_TD = combine(z_ND, order, weight_TK=weight_TK)
        if self.shared_gate_up is None or self.shared_down is None:
            return y_TD
        shared_TD = F.linear(gate(F.linear(h_TD, self.shared_gate_up)), self.shared_down)
        if self.shared_gate is not None:
            shared_TD = shared_TD * F.linear(h_TD, self.shared_gate).sigmoid()
        return y_TD + shared_TD


def is_fixed(name: str) -> bool:
    """Return whether a parameter of a decoder is never changed by training, and kept in fp32."""
    return name.endswith(_CORRECTION)


def is_of_all_experts(name: str) -> bool:
    """Return whether a parameter of a decoder has the matrices of all experts of a layer."""
    return name.endswith((".experts.gate_up", ".experts.down"))


def route(
    h_TD: Tensor,
    router_ED: Tensor,
    *,
    config: ExpertConfig,
    correction_E: Tensor | None,
    choose: Choose | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 (T, K), and their weights, fp32 (T, K).

    The weights are those of this router even if ``choose`` replaces its choice, so that it always
    has a gradient.
    """
    wide = torch.promote_types(h_TD.dtype, torch.float32)
    logits_TE = F.linear(h_TD.to(wide), router_ED.to(wide))
    if config.scoring == "softmax_of_chosen":
        score_TE = logits_TE
    elif config.scoring == "softmax":
        score_TE = logits_TE.softmax(-1)
    else:
        score_TE = logits_TE.sigmoid()
    expert_TK = _choose(score_TE.detach(), config, correction_E=correction_E)
    if choose is not None:
        expert_TK = choose(expert_TK)
    weight_TK = score_TE.gather(1, expert_TK)
    if config.scoring == "softmax_of_chosen":
        weight_TK = weight_TK.softmax(-1)
    if config.is_renormalized:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + _EPSILON)
    return expert_TK, weight_TK * config.scale if config.scale != 1.0 else weight_TK


def _choose(score_TE: Tensor, config: ExpertConfig, *, correction_E: Tensor | None) -> Tensor:
    """Return the experts with the largest corrected scores, among those of the best groups."""
    choice_TE = score_TE
    if correction_E is not None:  # which is on the host if weights are offloaded
        choice_TE = score_TE + correction_E.to(score_TE.device)
    if config.num_groups > 1:
        grouped_TGE = choice_TE.unflatten(1, (config.num_groups, -1))
        best_TG = grouped_TGE.topk(min(2, grouped_TGE.shape[2]), -1)[0].sum(-1)
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, best_TG.topk(config.num_kept_groups, -1)[1], False)
        choice_TE = grouped_TGE.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)
    return choice_TE.topk(config.num_chosen, -1)[1]


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
    gate_up_N2F = F.grouped_mm(x_ND, gate_up_E2FD.transpose(1, 2), offs=stop_E)
    return F.grouped_mm(gate(gate_up_N2F), down_EDF.transpose(1, 2), offs=stop_E)


def combine(z_ND: Tensor, order: ExpertOrder, *, weight_TK: Tensor) -> Tensor:
    """Return the weighted sum of each token's outputs, (T, D), added in fp32."""
    z_TKD = _Collect.apply(z_ND, order.source_N, order.place_N).unflatten(0, weight_TK.shape)
    return (z_TKD * weight_TK[..., None]).sum(1).to(z_ND.dtype)


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


def _parameter(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))
