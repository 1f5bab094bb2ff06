# SPDX-License-Identifier: Apache-2.0
"""The feed-forward with experts: a router, routed experts, and an expert that computes all tokens.

Trainer and rollout share it. No token is dropped, and there is no auxiliary loss.

Shapes: T tokens, D hidden, E experts, K chosen for a token, F expert width, S width of the shared
expert.
"""

from __future__ import annotations

from typing import overload

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig
from tandem.models.gradient_sum import linear
from tandem.models.operators import Operators
from tandem.models.router import Choose

_CORRECTION = ".correction"


class Experts(nn.Module):
    """The feed-forward of a layer with experts, without biases.

    Attributes:
        router: (E, D).
        routed: all experts, or those of one process of expert parallelism.
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
        self.routed = RoutedExperts(experts, inner, hidden=hidden)
        self.shared_gate_up = _parameter(2 * shared, hidden) if shared else None
        self.shared_down = _parameter(hidden, shared) if shared else None
        self.shared_gate = _parameter(1, hidden) if config.has_shared_gate else None

    def forward(
        self, h_TD: Tensor, operators: Operators, *, choose: Choose | None = None
    ) -> Tensor:
        """Return the outputs (T, D) for the normed inputs.

        Args:
            operators: those of the decoder.
            choose: the function from the router's choice to the experts that compute.
        """
        router_ED, shared_gate = self.router, self.shared_gate
        if self.config.freezes_router:
            router_ED, shared_gate = _without_gradient(router_ED), _without_gradient(shared_gate)
        expert_TK, weight_TK = operators.route(
            h_TD, router_ED, config=self.config, correction_E=self.correction, choose=choose
        )
        y_TD = self.routed(h_TD, operators, expert_TK=expert_TK, weight_TK=weight_TK)
        if self.shared_gate_up is None or self.shared_down is None:
            return y_TD
        gated_TS = operators.gate(linear(h_TD, self.shared_gate_up, bias_N=None))
        shared_TD = linear(gated_TS, self.shared_down, bias_N=None)
        if shared_gate is not None:
            shared_TD = shared_TD * F.linear(h_TD, shared_gate).sigmoid()
        return y_TD + shared_TD


class RoutedExperts(nn.Module):
    """The experts of a layer, which compute the tokens that the router sends them.

    Attributes:
        gate_up, down: (E, 2 F, D) and (E, D, F).
    """

    def __init__(self, num_experts: int, inner: int, *, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(num_experts, hidden, inner))

    def forward(
        self,
        h_TD: Tensor,
        operators: Operators,
        *,
        expert_TK: Tensor,
        weight_TK: Tensor,
    ) -> Tensor:
        """Return the weighted sum of each token's outputs, (T, D)."""
        return operators.experts(
            h_TD, expert_TK, weight_TK=weight_TK, gate_up_E2FD=self.gate_up, down_EDF=self.down
        )


def is_fixed(name: str) -> bool:
    """Return whether a parameter of a decoder is never changed by training, and kept in fp32."""
    return name.endswith(_CORRECTION)


def is_of_router(name: str) -> bool:
    """Return whether a parameter of a decoder decides how much an expert counts for a token."""
    return name.endswith((".router", ".shared_gate"))


def is_of_all_experts(name: str) -> bool:
    """Return whether a parameter of a decoder has the matrices of all experts of a layer."""
    return name.endswith((".routed.gate_up", ".routed.down"))


@overload
def _without_gradient(weight: Tensor) -> Tensor: ...
@overload
def _without_gradient(weight: Tensor | None) -> Tensor | None: ...
def _without_gradient(weight: Tensor | None) -> Tensor | None:
    """Return the same values, whose gradient is 0: engines expect a gradient of each weight."""
    if weight is None or not torch.is_grad_enabled():
        return weight
    return weight.detach() + 0 * weight


def _parameter(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))
