# SPDX-License-Identifier: Apache-2.0
"""The operators of a decoder whose large matrix products are in fp8, as one replaceable set.

Weights have one scale for each matrix, activations one for each token; the largest number becomes
``LARGEST``. e4m3 numbers are as precise 14 powers of two below the largest as they are there, so
that a scale for each row of weights would gain nothing. A product is computed without the scales of
the tokens, because the vendors' fastest kernels take one scale; the operator that reads the product
applies them. ``TORCH_QUANTIZED`` runs on every device and defines the results. No gradients.

Shapes: T tokens, D hidden, N outputs of a product, M heads of query, key and value together, E head
dimension, F feed-forward, K inner dimension of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest number of e4m3."""
SMALLEST_SCALE = 1e-12
"""The scale of zeros."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights in fp8 (N, K), and their scale, fp32 ()."""

    values_NK: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedTokens:
    """Activations in fp8 (T, K), and the fp32 scales (T,) of the tokens."""

    values_TK: Tensor
    scale_T: Tensor

    def dequantize(self) -> Tensor:
        """Return the activations in fp32."""
        return self.values_TK.float() * self.scale_T[:, None]


@dataclass(frozen=True, slots=True)
class Product:
    """A product (T, N), of a matrix alone in bf16, before the scales of the tokens are applied.

    Entry (t, n) stands for ``raw_TN[t, n] * scale_T[t]``.
    """

    raw_TN: Tensor
    scale_T: Tensor

    def dequantize(self) -> Tensor:
        """Return the product in fp32."""
        return self.raw_TN.float() * self.scale_T[:, None]


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """The heads of query, key and value, and the optional norms of query and key.

    Attributes:
        num_heads, num_kv_heads, head_dim: the sizes.
        bias_N: the bias of the projection, or None.
        q_norm_E, k_norm_E: the weights of the norms, or None.
        eps: the epsilon of the norms.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias_N: Tensor | None
    q_norm_E: Tensor | None
    k_norm_E: Tensor | None
    eps: float


class AddNormQuantized(Protocol):
    """The type of ``QuantizedOperators.add_norm``."""

    def __call__(
        self, x_TD: Tensor, delta: Tensor | Product | None, *, weight_D: Tensor, eps: float
    ) -> tuple[QuantizedTokens, Tensor]: ...


class AddLastNorm(Protocol):
    """The type of ``QuantizedOperators.last_norm``."""

    def __call__(self, x_TD: Tensor, delta: Product, *, weight_D: Tensor, eps: float) -> Tensor: ...


class IntoHeads(Protocol):
    """The type of ``QuantizedOperators.heads``."""

    def __call__(
        self, product: Product, layout: HeadLayout, *, angles: tuple[Tensor, Tensor]
    ) -> Tensor: ...


@dataclass(frozen=True)
class QuantizedOperators:
    """A set of functions of tensors without gradients.

    Attributes:
        add_norm: as ``Operators.add_norm``, with a quantized norm. The tensor to be added may be a
            product.
        last_norm: the norm of the sum, in the dtype of the weight.
        heads: ``(product, layout, angles=) -> (T, M, E)``: query, key and value with bias and
            norms, query and key rotated. The result has the dtype of the cosines.
        gate: ``product -> quantized (T, F)``: silu of the first half times the second.
    """

    add_norm: AddNormQuantized
    last_norm: AddLastNorm
    heads: IntoHeads
    gate: Callable[[Product], QuantizedTokens]


def empty_weight(like_NK: Tensor) -> QuantizedWeight:
    """Return quantized weights of the same shape and device, without values."""
    values_NK = torch.empty(like_NK.shape, dtype=FP8, device=like_NK.device)
    return QuantizedWeight(values_NK, torch.empty((), device=like_NK.device))


def empty_tokens(num_tokens: int, num_columns: int, *, device: torch.device) -> QuantizedTokens:
    """Return quantized activations without values."""
    values_TK = torch.empty((num_tokens, num_columns), dtype=FP8, device=device)
    return QuantizedTokens(values_TK, torch.empty(num_tokens, device=device))


def quantize_weight(weight_NK: Tensor, out: QuantizedWeight) -> None:
    """Write the weights in fp8 into ``out``, without waiting for the device."""
    lowest, highest = weight_NK.aminmax()
    largest = torch.maximum(-lowest, highest).float()
    smallest = max(SMALLEST_SCALE, 2 / torch.finfo(weight_NK.dtype).max)  # its inverse is finite
    torch.clamp(largest / LARGEST, min=smallest, out=out.scale)
    # The rounding of this product is 16 times finer than that of fp8.
    scaled_NK = weight_NK * out.scale.reciprocal().to(weight_NK.dtype)
    out.values_NK.copy_(scaled_NK.clamp_(-LARGEST, LARGEST))


def multiply(x: QuantizedTokens, weight: QuantizedWeight) -> Product:
    """Return the product of activations (T, K) and weights (N, K)."""
    if x.values_TK.device.type == "cpu":
        # torch's product of fp8 numbers takes hundreds of times as long there.
        sum_TN = F.linear(x.values_TK.float(), weight.values_NK.float())
        return Product((sum_TN * weight.scale).bfloat16(), x.scale_T)
    return Product(multiply_in_fp8(x, weight), x.scale_T)


def multiply_in_fp8(x: QuantizedTokens, weight: QuantizedWeight) -> Tensor:
    """Return the product (T, N) by torch's operator, without the scales of the tokens."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        x.values_TK,
        weight.values_NK.T,
        scale_a=_one(x.scale_T.device),
        scale_b=weight.scale,
        out_dtype=torch.bfloat16,
        use_fast_accum=True,
    )


@cache
def _one(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones((), device=device)


def _quantized(x_TK: Tensor) -> QuantizedTokens:
    x_TK = x_TK.float()
    scale_T = (x_TK.abs().amax(1) / LARGEST).clamp_(min=SMALLEST_SCALE)
    values_TK = (x_TK / scale_T[:, None]).clamp_(-LARGEST, LARGEST)
    return QuantizedTokens(values_TK.to(FP8), scale_T)


def _sum(x_TD: Tensor, delta: Tensor | Product | None) -> Tensor:
    if delta is None:
        return x_TD
    return x_TD + (delta.dequantize() if isinstance(delta, Product) else delta)


def _normed(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Return the root mean square norm over the last dimension, in fp32."""
    x = x.float()
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()


def add_norm(
    x_TD: Tensor, delta: Tensor | Product | None, *, weight_D: Tensor, eps: float
) -> tuple[QuantizedTokens, Tensor]:
    """See ``QuantizedOperators.add_norm``."""
    sum_TD = _sum(x_TD, delta).to(x_TD.dtype)
    return _quantized(_normed(sum_TD, weight_D, eps=eps)), sum_TD


def last_norm(x_TD: Tensor, delta: Product, *, weight_D: Tensor, eps: float) -> Tensor:
    """See ``QuantizedOperators.last_norm``."""
    sum_TD = _sum(x_TD, delta).to(x_TD.dtype)
    return _normed(sum_TD, weight_D, eps=eps).to(weight_D.dtype)


def heads(product: Product, layout: HeadLayout, *, angles: tuple[Tensor, Tensor]) -> Tensor:
    """See ``QuantizedOperators.heads``."""
    x_TN = product.dequantize()
    if layout.bias_N is not None:
        x_TN = x_TN + layout.bias_N
    num_heads, num_kv_heads = layout.num_heads, layout.num_kv_heads
    x_TME = x_TN.view(len(x_TN), num_heads + 2 * num_kv_heads, layout.head_dim)
    q_THE, k_TKE, v_TKE = x_TME.split((num_heads, num_kv_heads, num_kv_heads), 1)
    if layout.q_norm_E is not None and layout.k_norm_E is not None:
        q_THE = _normed(q_THE, layout.q_norm_E, eps=layout.eps)
        k_TKE = _normed(k_TKE, layout.k_norm_E, eps=layout.eps)
    cos_T1E, sin_T1E = angles
    qk_TME = torch.cat((q_THE, k_TKE), 1)
    rolled_TME = qk_TME.roll(layout.head_dim // 2, -1)
    rotated_TME = qk_TME * cos_T1E.float() + rolled_TME * sin_T1E.float()
    return torch.cat((rotated_TME, v_TKE), 1).to(cos_T1E.dtype)


def gate(product: Product) -> QuantizedTokens:
    """See ``QuantizedOperators.gate``."""
    gate_TF, up_TF = product.dequantize().chunk(2, -1)
    return _quantized(gate_TF.sigmoid() * gate_TF * up_TF)


TORCH_QUANTIZED = QuantizedOperators(add_norm, last_norm, heads, gate)
