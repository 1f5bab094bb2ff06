# SPDX-License-Identifier: Apache-2.0
"""The operators of a decoder that may have fused kernels, as one replaceable set.

Trainer and rollout call the same set. ``TORCH`` runs on every device and defines the results. Fused
kernels have the same signatures, forward and backward. The dense layers' matrix products are
not in the set, because the vendors' libraries are the fastest.

Shapes: T tokens, D hidden, M heads, H query heads, K key/value heads or chosen experts, E head
dimension or experts, F feed-forward, R rows, V vocabulary, I inputs, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from tandem.config.derived.experts import ExpertConfig
from tandem.errors import UserError
from tandem.models.attention import PackedAttention, RunAttention
from tandem.models.expert_products import ExpertParts, combine, differentiate, run_experts
from tandem.models.gradient_sum import AddProduct
from tandem.models.logprob import TokenLogProbs, token_log_probs
from tandem.models.quantized_operators import TORCH_QUANTIZED, QuantizedOperators
from tandem.models.router import Choose, route
from tandem.platforms.record import Platform
from tandem.types import Segments

Attention = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attention(layer, q_THE, k_TKE, v_TKE) -> o_THE``, called after the rotary embedding."""

AttendWithin = Callable[..., Tensor]
"""``attend(q_NHE, k_NHE, v_NHE=) -> o_NHE`` of N patches of pictures."""

MakeAttention = Callable[[Segments, torch.device], Attention]
Angles = tuple[Tensor, Tensor]
"""The cosines and signed sines (T, 1, E) of ``rotary.Rotary.angles``."""


class AddNorm(Protocol):
    """The type of ``Operators.add_norm``."""

    def __call__(
        self, x_TD: Tensor, delta_TD: Tensor | None, *, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]: ...


class NormHeads(Protocol):
    """The type of ``Operators.norm_heads``."""

    def __call__(
        self,
        x_TME: Tensor,
        num_queries: int,
        *,
        q_weight_E: Tensor,
        k_weight_E: Tensor,
        eps: float,
    ) -> Tensor: ...


class RunExperts(Protocol):
    """The type of ``Operators.experts``."""

    def __call__(
        self,
        h_TD: Tensor,
        expert_TK: Tensor,
        *,
        weight_TK: Tensor,
        gate_up_E2FD: Tensor,
        down_EDF: Tensor,
        is_part: bool = False,
    ) -> Tensor: ...


class Route(Protocol):
    """The type of ``Operators.route``."""

    def __call__(
        self,
        h_TD: Tensor,
        router_ED: Tensor,
        *,
        config: ExpertConfig,
        correction_E: Tensor | None,
        choose: Choose | None = None,
    ) -> tuple[Tensor, Tensor]: ...


class ScoreTokens(Protocol):
    """The type of ``Operators.token_log_probs``."""

    def __call__(
        self,
        h_RD: Tensor,
        weight_VD: Tensor,
        *,
        target_R: Tensor,
        temperature: float,
        with_entropy: bool,
    ) -> TokenLogProbs: ...


@dataclass(frozen=True)
class Operators:
    """A set of differentiable functions of tensors.

    Attributes:
        add_norm: ``(x_TD, delta_TD or None, weight_D=, eps=) -> (h_TD, sum_TD)``: the residual sum
            x + delta in the dtype of x, and its root mean square norm times the weight, in the
            dtype of the weight, which may have a lower precision.
        norm_heads: ``(x_TME, num_queries, q_weight_E=, k_weight_E=, eps=) -> y_TME``: the root mean
            square norm of each head times the weight of queries, which come first, or of keys.
            ``x_TME`` may be a slice of a larger tensor.
        rotate: ``(x_TME, angles) -> y_TME``: the rotary embedding of M heads at once. The sines
            have the sign of the first half. ``x_TME`` may be a slice of a larger tensor.
        gate: ``gate_up_T2F -> y_TF``: silu of the first half times the second.
        packed_attention: ``(segments, device) -> attention`` for one packed batch.
        attention_within: ``(lengths, device) -> attend`` for runs of patches of ``lengths``, int64,
            each of which attends to all of its run.
        token_log_probs: see ``logprob.token_log_probs``.
        logits: ``(h_RD, weight_VD) -> logits_RV`` in at least fp32, without gradients.
        route: see ``router.route``.
        experts: ``(h_TD, expert_TK, weight_TK=, gate_up_E2FD=, down_EDF=, is_part=False) -> y_TD``:
            the weighted sum of the outputs of each token's experts. With ``is_part``, the number E
            stands for all experts of other processes, which add nothing.
        expert_parts: the operations of ``experts`` between its products.
        add_into: ``(total, x) -> None``: adds x to a sum in place, which may have a higher
            precision, without gradients.
        add_product: ``(total_NI, y_TN, x_TI=) -> None``: adds y^T x to a sum in place, which
            may have a higher precision, without gradients.
        quantized: the operators of a decoder that generates in fp8.
    """

    add_norm: AddNorm
    norm_heads: NormHeads
    rotate: Callable[[Tensor, Angles], Tensor]
    gate: Callable[[Tensor], Tensor]
    packed_attention: MakeAttention
    attention_within: Callable[[np.ndarray, torch.device], AttendWithin]
    token_log_probs: ScoreTokens
    logits: Callable[[Tensor, Tensor], Tensor]
    route: Route
    experts: RunExperts
    expert_parts: ExpertParts
    add_into: Callable[[Tensor, Tensor], object]
    add_product: AddProduct
    quantized: QuantizedOperators


def add_norm(
    x_TD: Tensor, delta_TD: Tensor | None, *, weight_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """See ``Operators.add_norm``."""
    if torch.is_grad_enabled():
        return _AddNorm.apply(x_TD, delta_TD, weight_D, eps)
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    return _normed(sum_TD, _inverse_rms(sum_TD, eps), weight_D=weight_D), sum_TD


class _AddNorm(torch.autograd.Function):
    """The residual sum s and its norm h = n w with n = s / rms(s), and their gradients.

    With g = dL/dh w: ds = (g - n mean(g n)) / rms(s), and dw is the sum of dL/dh n.
    """

    @staticmethod
    def forward(
        ctx: Any, x_TD: Tensor, delta_TD: Tensor | None, weight_D: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
        inverse_T1 = _inverse_rms(sum_TD, eps)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sum_TD, inverse_T1, weight_D)
        return _normed(sum_TD, inverse_T1, weight_D=weight_D), sum_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_h_TD: Tensor | None, grad_sum_TD: Tensor | None) -> Any:
        sum_TD, inverse_T1, weight_D = ctx.saved_tensors
        has_delta = ctx.needs_input_grad[1]
        if grad_h_TD is None:
            return grad_sum_TD, grad_sum_TD if has_delta else None, None, None
        grad_TD, weight_D = grad_h_TD.to(inverse_T1.dtype), weight_D.to(inverse_T1.dtype)
        product_TD = grad_TD * sum_TD
        grad_weight_D = None  # of a frozen weight
        if ctx.needs_input_grad[2]:
            grad_weight_D = torch.mv(product_TD.T, inverse_T1[:, 0]).to(grad_h_TD.dtype)
        mean_T1 = (
            torch.mv(product_TD, weight_D)[:, None].mul_(inverse_T1.pow(3)).div_(len(weight_D))
        )
        grad_TD = (grad_TD * weight_D).mul_(inverse_T1).addcmul_(sum_TD, mean_T1, value=-1)
        if grad_sum_TD is not None:
            grad_TD += grad_sum_TD
        grad_TD = grad_TD.to(sum_TD.dtype)
        return grad_TD, grad_TD if has_delta else None, grad_weight_D, None


def _inverse_rms(x_TD: Tensor, eps: float) -> Tensor:
    """Return the inverse root mean squares, (T, 1), in at least fp32."""
    dtype = torch.promote_types(x_TD.dtype, torch.float32)
    norm_T1 = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=dtype)
    epsilon = _constant(eps, dtype, device=x_TD.device)
    return torch.addcmul(epsilon, norm_T1, norm_T1, value=1 / x_TD.shape[-1]).rsqrt_()


@cache
def _constant(value: float, dtype: torch.dtype, *, device: torch.device) -> Tensor:
    # Operations with a tensor are three times as fast as with a Python number.
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device=device)


def _normed(x_TD: Tensor, inverse_T1: Tensor, *, weight_D: Tensor) -> Tensor:
    return (x_TD * inverse_T1).mul_(weight_D).to(weight_D.dtype)


def norm_heads(
    x_TME: Tensor, num_queries: int, *, q_weight_E: Tensor, k_weight_E: Tensor, eps: float
) -> Tensor:
    """See ``Operators.norm_heads``."""
    q_THE, k_TKE = x_TME.split((num_queries, x_TME.shape[1] - num_queries), 1)
    q_THE = F.rms_norm(q_THE, q_weight_E.shape, q_weight_E, eps)
    return torch.cat((q_THE, F.rms_norm(k_TKE, k_weight_E.shape, k_weight_E, eps)), 1)


def rotate(x_TME: Tensor, angles: Angles) -> Tensor:
    """See ``Operators.rotate``."""
    cos_T1E, sin_T1E = angles
    rolled_TME = x_TME.roll(x_TME.shape[-1] // 2, -1)
    return torch.addcmul(x_TME * cos_T1E, rolled_TME, sin_T1E)


def gate(gate_up_T2F: Tensor) -> Tensor:
    """See ``Operators.gate``."""
    if torch.is_grad_enabled():
        return _Gate.apply(gate_up_T2F)
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return gate_TF.sigmoid().mul_(gate_TF).mul_(up_TF)


class _Gate(torch.autograd.Function):
    """The gated activation. The derivative of silu is sigmoid + silu (1 - sigmoid)."""

    @staticmethod
    def forward(ctx: Any, gate_up_T2F: Tensor) -> Tensor:
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        sigmoid_TF = gate_TF.sigmoid()
        ctx.save_for_backward(gate_up_T2F, sigmoid_TF)
        return (sigmoid_TF * gate_TF).mul_(up_TF)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TF: Tensor) -> Tensor:
        gate_up_T2F, sigmoid_TF = ctx.saved_tensors
        gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
        grad_gate_up_T2F = torch.empty_like(gate_up_T2F)
        grad_gate_TF, grad_up_TF = grad_gate_up_T2F.chunk(2, -1)
        silu_TF = sigmoid_TF * gate_TF
        torch.mul(grad_TF, silu_TF, out=grad_up_TF)
        torch.mul(grad_TF, up_TF, out=grad_gate_TF)
        grad_gate_TF *= silu_TF.lerp_(silu_TF.new_ones(()), sigmoid_TF)
        return grad_gate_up_T2F


def logits(h_RD: Tensor, weight_VD: Tensor) -> Tensor:
    """See ``Operators.logits``."""
    logits_RV = F.linear(h_RD, weight_VD)
    return logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))


def add_product(total_NI: Tensor, y_TN: Tensor, *, x_TI: Tensor) -> None:
    """See ``Operators.add_product``."""
    total_NI.add_(y_TN.T @ x_TI)


_EXPERT_PARTS = ExpertParts(gate, combine, partial(differentiate, gate=gate))
TORCH = Operators(
    add_norm,
    norm_heads,
    rotate,
    gate,
    PackedAttention,
    RunAttention,
    token_log_probs,
    logits,
    route,
    partial(run_experts, parts=_EXPERT_PARTS),
    _EXPERT_PARTS,
    Tensor.add_,
    add_product,
    TORCH_QUANTIZED,
)


def operators_for(platform: Platform) -> Operators:
    """Return the fused operators if the platform has Triton kernels, else ``TORCH``.

    Raises:
        UserError: triton is needed but not installed.
    """
    if platform.kernels == "torch":
        return TORCH
    try:
        from tandem.models.kernels.operators import TRITON, TRITON_AND_DENSE
    except ModuleNotFoundError as error:
        raise UserError(
            "trainer.device",
            platform.name,
            rule=f"its kernels need triton ({error})",
            remedy="Install triton, or set trainer.device=cpu.",
        ) from error
    return TRITON_AND_DENSE if platform.has_dense_attention() else TRITON


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small tensor from the host to ``device`` without waiting for the device.

    A copy from ordinary memory waits for all work queued on the device. A copy from pinned memory
    is only queued, and the host prepares the next micro-batch meanwhile.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
