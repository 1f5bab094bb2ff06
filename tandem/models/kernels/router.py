# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""A Triton kernel: the router of experts in generation, from its product to the weights.

torch's operators take ten launches for it. They compute training and scoring, whose choices must be
the same, groups of experts, and choices that are replaced; products of bf16 tensors are added in
fp32 there (``_HalfProduct``). Among equal scores the first expert is chosen.

Shapes: T tokens, D hidden, E experts, K chosen for a token.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.config.derived.experts import ExpertConfig
from tandem.models import router
from tandem.models.router import Choose

_ROWS = 16
_DEPTH = 64


def route(
    h_TD: Tensor,
    router_ED: Tensor,
    *,
    config: ExpertConfig,
    correction_E: Tensor | None,
    choose: Choose | None = None,
) -> tuple[Tensor, Tensor]:
    """See ``router.route``."""
    num_tokens, hidden = h_TD.shape
    generates = torch.is_inference_mode_enabled() and h_TD.dtype != torch.float64
    is_plain = config.num_groups == 1 and h_TD.dtype == router_ED.dtype
    if not generates or not is_plain:
        return _route_by_torch(
            h_TD, router_ED, config=config, correction_E=correction_E, choose=choose
        )
    size = (num_tokens, config.num_chosen)
    expert_TK = torch.empty(size, dtype=torch.int64, device=h_TD.device)
    weight_TK = torch.empty(size, dtype=torch.float32, device=h_TD.device)
    if num_tokens:
        _route[(-(-num_tokens // _ROWS),)](
            expert_TK,
            weight_TK,
            h_TD.contiguous(),
            router_ED,
            router_ED if correction_E is None else correction_E.to(h_TD.device),
            num_tokens,
            HIDDEN=hidden,
            NUM_EXPERTS=config.num_experts,
            EXPERTS=max(16, triton.next_power_of_2(config.num_experts)),
            CHOSEN=config.num_chosen,
            CHOICES=triton.next_power_of_2(config.num_chosen),
            SCORING=config.scoring,
            IS_RENORMALIZED=config.is_renormalized,
            HAS_CORRECTION=correction_E is not None,
            SCALE=config.scale,
            EPSILON=router.EPSILON,
            ROWS=_ROWS,
            DEPTH=_DEPTH,
            num_warps=4,
            num_stages=4,
        )
    if choose is None or (chosen_TK := choose(expert_TK)) is expert_TK:  # only recorded
        return expert_TK, weight_TK
    return _route_by_torch(
        h_TD,
        router_ED,
        config=config,
        correction_E=correction_E,
        choose=lambda _: chosen_TK,
    )


def _route_by_torch(
    h_TD: Tensor,
    router_ED: Tensor,
    *,
    config: ExpertConfig,
    correction_E: Tensor | None,
    choose: Choose | None,
) -> tuple[Tensor, Tensor]:
    is_half = h_TD.dtype == router_ED.dtype == torch.bfloat16
    return router.route(
        h_TD,
        router_ED,
        config=config,
        correction_E=correction_E,
        choose=choose,
        multiply=_HalfProduct.apply if is_half else None,
    )


class _HalfProduct(torch.autograd.Function):
    """The fp32 logits of bf16 tensors.

    Devices multiply bf16 numbers much faster than fp32 ones. The products are added in fp32, in
    which a product of two bf16 numbers is exact. In the backward pass, the gradient of the logits
    is divided into two bf16 tensors, whose sum keeps about 16 of its bits.
    """

    @staticmethod
    def forward(ctx: Any, h_TD: Tensor, router_ED: Tensor) -> Tensor:
        ctx.save_for_backward(h_TD, router_ED)
        return _multiply_wide(h_TD, router_ED.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> Any:
        h_TD, router_ED = ctx.saved_tensors
        high_TE = grad_TE.to(h_TD.dtype)
        low_TE = (grad_TE - high_TE).to(h_TD.dtype)
        parts_T2E = torch.cat((high_TE, low_TE), 1)
        grad_TD = grad_ED = None
        if ctx.needs_input_grad[0]:
            grad_TD = parts_T2E @ torch.cat((router_ED, router_ED))
        if ctx.needs_input_grad[1]:
            grad_2ED = _multiply_wide(parts_T2E.T, h_TD).unflatten(0, (2, -1))
            grad_ED = grad_2ED.sum(0).to(router_ED.dtype)
        return grad_TD, grad_ED


def _multiply_wide(x_MN: Tensor, y_NO: Tensor) -> Tensor:
    """Return the product of bf16 matrices in fp32."""
    if x_MN.device.type == "cpu":
        return torch.mm(x_MN.float(), y_NO.float())
    return torch.mm(x_MN, y_NO, out_dtype=torch.float32)


@triton.jit
def _choose(choice, score, order, NUM_EXPERTS: tl.constexpr, CHOSEN: tl.constexpr):
    """Return the experts with the largest ``choice``, in order, and their scores."""
    expert = tl.arange(0, choice.shape[1])
    chosen = tl.zeros((choice.shape[0], order.shape[0]), tl.int64)
    weight = tl.full((choice.shape[0], order.shape[0]), float("-inf"), tl.float32)
    for number in range(CHOSEN):
        # Of scores that are not numbers, the last expert is chosen.
        is_best = choice == tl.max(choice, 1)[:, None]
        best = tl.min(tl.where(is_best, expert[None, :], NUM_EXPERTS - 1), 1)
        is_chosen = expert[None, :] == best[:, None]
        own = tl.sum(tl.where(is_chosen, score, 0.0), 1)
        is_place = (order == number)[None, :]
        chosen = tl.where(is_place, best[:, None].to(tl.int64), chosen)
        weight = tl.where(is_place, own[:, None], weight)
        choice = tl.where(is_chosen, float("-inf"), choice)
    return chosen, weight


@triton.jit
def _route(
    expert_ptr,
    weight_ptr,
    h_ptr,
    router_ptr,
    correction_ptr,
    num_tokens,
    HIDDEN: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHOSEN: tl.constexpr,
    CHOICES: tl.constexpr,
    SCORING: tl.constexpr,
    IS_RENORMALIZED: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    SCALE: tl.constexpr,
    EPSILON: tl.constexpr,
    ROWS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    token = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    is_token, is_expert = token < num_tokens, expert < NUM_EXPERTS
    logits = tl.zeros((ROWS, EXPERTS), tl.float32)
    for offset in range(0, HIDDEN, DEPTH):
        at = offset + tl.arange(0, DEPTH)
        inside = at < HIDDEN
        h_at = h_ptr + token[:, None] * HIDDEN + at[None, :]
        h = tl.load(h_at, is_token[:, None] & inside[None, :], 0.0)
        row_at = router_ptr + expert[:, None] * HIDDEN + at[None, :]
        row = tl.load(row_at, is_expert[:, None] & inside[None, :], 0.0)
        logits = tl.dot(h, tl.trans(row), logits, input_precision="ieee")
    logits = tl.where(is_expert[None, :], logits, float("-inf"))
    score = logits
    if SCORING == "softmax":
        score = tl.exp(logits - tl.max(logits, 1)[:, None])
        score = score / tl.sum(score, 1)[:, None]
    elif SCORING == "sigmoid":
        score = 1 / (1 + tl.exp(-logits))
    choice = score
    if HAS_CORRECTION:
        choice += tl.load(correction_ptr + expert, is_expert, 0.0)[None, :]
    choice = tl.where(is_expert[None, :], choice, float("-inf"))

    order = tl.arange(0, CHOICES)
    chosen, weight = _choose(choice, score, order, NUM_EXPERTS, CHOSEN)
    is_choice = (order < CHOSEN)[None, :]
    if SCORING == "softmax_of_chosen":
        weight = tl.exp(weight - tl.max(weight, 1)[:, None])
        weight = weight / tl.sum(weight, 1)[:, None]
    if IS_RENORMALIZED:
        total = tl.sum(tl.where(is_choice, weight, 0.0), 1)
        weight = weight / (total + EPSILON)[:, None]
    place = token[:, None] * CHOSEN + order[None, :]
    is_stored = is_token[:, None] & is_choice
    tl.store(expert_ptr + place, chosen, is_stored)
    tl.store(weight_ptr + place, weight * SCALE, is_stored)
