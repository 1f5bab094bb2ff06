# SPDX-License-Identifier: Apache-2.0
"""The feed-forward with experts: a router, routed experts, and an expert that computes all tokens.

Trainer and rollout share it. The router's product is in fp32 in both, because in bf16 the last
chosen expert and the first rejected one are often equal. No token is dropped, and there is no
auxiliary loss.

Shapes: T tokens, D hidden, E experts, K chosen for a token, F expert width, S width of the shared
expert.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig
from tandem.models.operators import Operators

Choose = Callable[[Tensor], Tensor]
"""A function from the experts that a router chose, int64 (T, K), to those that compute."""
_CORRECTION = ".correction"
_EPSILON = 1e-20
"""The number that DeepSeek's code adds to the sum of the weights before it divides by it."""


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
        expert_TK, weight_TK = route(
            h_TD, self.router, config=self.config, correction_E=self.correction, choose=choose
        )
        y_TD = self.routed(h_TD, operators, expert_TK=expert_TK, weight_TK=weight_TK)
        if self.shared_gate_up is None or self.shared_down is None:
            return y_TD
        gated_TS = operators.gate(F.linear(h_TD, self.shared_gate_up))
        shared_TD = F.linear(gated_TS, self.shared_down)
        if self.shared_gate is not None:
            shared_TD = shared_TD * F.linear(h_TD, self.shared_gate).sigmoid()
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


def is_of_all_experts(name: str) -> bool:
    """Return whether a parameter of a decoder has the matrices of all experts of a layer."""
    return name.endswith((".routed.gate_up", ".routed.down"))


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
        num_scores = min(config.num_group_scores, grouped_TGE.shape[2])
        best_TG = grouped_TGE.topk(num_scores, -1)[0].sum(-1)
        dropped_TG = torch.ones_like(best_TG, dtype=torch.bool)
        dropped_TG.scatter_(1, best_TG.topk(config.num_kept_groups, -1)[1], False)
        choice_TE = grouped_TGE.masked_fill(dropped_TG[..., None], float("-inf")).flatten(1)
    return choice_TE.topk(config.num_chosen, -1)[1]


def _parameter(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))
