# SPDX-License-Identifier: Apache-2.0
"""The router of a layer with experts: which experts compute a token, and their weights.

The logits are in fp32 in trainer and rollout, because in bf16 the last chosen expert and the first
rejected one are often equal.

Shapes: T tokens, D hidden, E experts, G groups of experts, K chosen for a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig

Choose = Callable[[Tensor], Tensor]
"""A function from the experts that a router chose, int64 (T, K), to those that compute."""
Multiply = Callable[[Tensor, Tensor], Tensor]
"""A differentiable function of h_TD and router_ED: the logits h r^T in at least fp32."""
EPSILON = 1e-20
"""The number that DeepSeek's code adds to the sum of the weights before it divides by it."""


def route(
    h_TD: Tensor,
    router_ED: Tensor,
    *,
    config: ExpertConfig,
    correction_E: Tensor | None,
    choose: Choose | None = None,
    multiply: Multiply | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the experts of each token, int64 (T, K), and their weights, fp32 (T, K).

    The weights are those of this router even if ``choose`` replaces its choice, so that it always
    has a gradient. ``multiply`` computes the logits; by default,
    both tensors are widened to fp32.
    """
    multiply = multiply or _WideProduct.apply
    logits_TE = multiply(h_TD, router_ED)
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
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + EPSILON)
    return expert_TK, weight_TK * config.scale if config.scale != 1.0 else weight_TK


class _WideProduct(torch.autograd.Function):
    """The logits in fp32. It keeps no tokens in fp32 for the gradient, and widens them again."""

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, router_ED: Tensor) -> Tensor:
        ctx.save_for_backward(h_TD, router_ED)
        wide = torch.promote_types(h_TD.dtype, torch.float32)
        return F.linear(h_TD.to(wide), router_ED.to(wide))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> Any:
        h_TD, router_ED = ctx.saved_tensors
        grad_TD = grad_ED = None
        if ctx.needs_input_grad[0]:
            grad_TD = (grad_TE @ router_ED.to(grad_TE.dtype)).to(h_TD.dtype)
        if ctx.needs_input_grad[1]:
            grad_ED = (grad_TE.T @ h_TD.to(grad_TE.dtype)).to(router_ED.dtype)
        return grad_TD, grad_ED


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
