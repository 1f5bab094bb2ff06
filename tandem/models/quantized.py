# SPDX-License-Identifier: Apache-2.0
"""A decoder for generation whose large matrix products are in fp8.

The weights of query, key and value, of gate and up, and of down are copied into fp8 with one scale
for each of these three matrices; activations get one scale for each token. Attention and its output
projection, the embedding, the norms, the head and adapters are the decoder's own; adapters of a
quantized matrix multiply its quantized activations. There are no gradients.

Shapes: T tokens, D hidden, H query heads, K key/value heads, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.errors import UserError
from tandem.models.adapted import AdaptedLinear, add_adapters
from tandem.models.decoder import Decoder, DecoderConfig, DecoderLayer
from tandem.models.operators import Attention
from tandem.models.quantized_operators import (
    HeadLayout,
    Product,
    QuantizedTokens,
    QuantizedWeight,
    empty_weight,
    multiply,
    quantize_weight,
)

KEY = "actor_rollout_ref.rollout.quantization"
_Map = nn.Linear | AdaptedLinear
ALIGNMENT = 16
"""Both sizes of an fp8 matrix are multiples of this, as the libraries demand."""


@dataclass(frozen=True, slots=True)
class _Layer:
    """The quantized weights of a layer."""

    qkv: QuantizedWeight
    gate_up: QuantizedWeight
    down: QuantizedWeight


def require_quantizable(config: DecoderConfig) -> None:
    """Raise UserError if the products of such a decoder cannot be in fp8."""
    remedy = f"Leave out {KEY}, or use another model."
    if config.mlp_bias:
        rule = "it is not built for models whose feed-forward has a bias"
        raise UserError(KEY, "fp8", rule=rule, remedy=remedy)
    if config.experts is not None:
        rule = "it is not built for models with experts"
        raise UserError(KEY, "fp8", rule=rule, remedy=remedy)
    if config.latent is not None:
        rule = "it is not built for models with latent attention"
        raise UserError(KEY, "fp8", rule=rule, remedy=remedy)
    if config.vision is not None:
        rule = "it is not built for models that see"
        raise UserError(KEY, "fp8", rule=rule, remedy=remedy)
    sizes = (
        config.hidden_size,
        config.intermediate_size,
        (config.num_heads + 2 * config.num_kv_heads) * config.head_dim,
    )
    if any(size % ALIGNMENT for size in sizes):
        rule = f"the sizes of the model's matrices {sizes} must be multiples of {ALIGNMENT}"
        raise UserError(KEY, "fp8", rule=rule, remedy=remedy)


class QuantizedDecoder:
    """A function from tokens to final hidden states, as ``Decoder.forward``.

    ``outdate`` must follow every change of the decoder's weights, and ``update`` must precede every
    computation. The quantized weights stay where they are until ``free``, so that captured steps
    may refer to them.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Wrap ``decoder``. The first ``update`` allocates the copies.

        Raises:
            UserError: see ``require_quantizable``.
        """
        require_quantizable(decoder.config)
        self._decoder = decoder
        self._layers: list[_Layer] = []
        self._is_outdated = True

    @property
    def num_bytes(self) -> int:
        """The bytes of the copies once they are allocated; their scales are below a thousandth."""
        return sum(x.weight.numel() for layer in self._decoder_layers for x in _maps(layer))

    def outdate(self) -> None:
        """Make the next ``update`` read the decoder's weights again, unless they are frozen below
        adapters.
        """
        self._is_outdated = self._decoder.config.adapters is None or not self._layers

    def update(self) -> None:
        """Quantize the current weights of the decoder, unless that has been done."""
        if not self._is_outdated:
            return
        self._is_outdated = False
        if not self._layers:
            self._layers = [
                _Layer(*(empty_weight(x.weight) for x in _maps(layer)))
                for layer in self._decoder_layers
            ]
        with torch.no_grad():
            for layer, own in zip(self._decoder_layers, self._layers, strict=True):
                for source, target in zip(
                    _maps(layer), (own.qkv, own.gate_up, own.down), strict=True
                ):
                    quantize_weight(source.weight, target)

    def free(self) -> None:
        """Free the copies. ``update`` makes new ones."""
        self._layers = []
        self._is_outdated = True

    @property
    def _decoder_layers(self) -> list[DecoderLayer]:
        return list(self._decoder.layers)  # pyright: ignore[reportReturnType]

    def __call__(self, token_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states (T, D) after the final norm."""
        assert self._layers, "update comes first"
        decoder, operators = self._decoder, self._decoder.operators.quantized
        x_TD = decoder.embedding(token_ids_T)
        angles = decoder.rotary.angles(position_ids_T, x_TD.dtype)
        x_TD = x_TD.to(torch.promote_types(x_TD.dtype, torch.float32))
        delta: Product | None = None
        for layer, own in zip(self._decoder_layers, self._layers, strict=True):
            norm = layer.attention_norm.weight
            qkv, gate_up, down = _maps(layer)
            h, x_TD = operators.add_norm(x_TD, delta, weight_D=norm, eps=layer.eps)
            product = _product(h, own.qkv, source=qkv)
            heads_TME = operators.heads(product, _head_layout(layer, qkv), angles=angles)
            o_TD = _attend(layer, heads_TME, attention=attention)
            h, x_TD = operators.add_norm(x_TD, o_TD, weight_D=layer.mlp_norm.weight, eps=layer.eps)
            gated = operators.gate(_product(h, own.gate_up, source=gate_up))
            delta = _product(gated, own.down, source=down)
        assert delta is not None, "a decoder has layers"
        norm = decoder.final_norm.weight
        return operators.last_norm(x_TD, delta, weight_D=norm, eps=decoder.config.rms_norm_eps)


def _maps(layer: DecoderLayer) -> tuple[_Map, _Map, _Map]:
    """Return the maps that are quantized."""
    return _linear(layer.qkv), _linear(layer.gate_up), _linear(layer.down)


def _linear(module: nn.Module) -> _Map:
    assert isinstance(module, _Map), "other maps beside quantized weights are refused"
    return module


def _product(x: QuantizedTokens, weight: QuantizedWeight, *, source: _Map) -> Product:
    """Return the product with a quantized matrix, and with the adapters of its map.

    The adapters' product is computed in their precision and added before the scales of the tokens
    are applied; in fp16, whose range numbers without these scales may exceed, afterwards.
    """
    product = multiply(x, weight)
    if isinstance(source, nn.Linear):
        return product
    dtype = source.lora_a.dtype
    if dtype == torch.float16:
        sum_TN = product.dequantize().to(dtype)
        add_adapters(sum_TN, x.dequantize().to(dtype), own=source)
        return Product(sum_TN, torch.ones_like(product.scale_T))
    raw_TN = product.raw_TN.to(dtype)
    add_adapters(raw_TN, x.values_TK.to(dtype), own=source)
    return Product(raw_TN, product.scale_T)


def _head_layout(layer: DecoderLayer, qkv: _Map) -> HeadLayout:
    heads, kv_heads = layer.qk_split
    return HeadLayout(
        heads,
        kv_heads,
        layer.head_shape[1],
        bias_N=qkv.bias,
        q_norm_E=None if layer.q_norm is None else layer.q_norm.weight,
        k_norm_E=None if layer.k_norm is None else layer.k_norm.weight,
        eps=layer.eps,
    )


def _attend(layer: DecoderLayer, heads_TME: Tensor, *, attention: Attention) -> Tensor:
    heads, kv_heads = layer.qk_split
    q_THE, k_TKE, v_TKE = heads_TME.split((heads, kv_heads, kv_heads), 1)
    return layer.o(attention(layer.index, q_THE, k_TKE, v_TKE).flatten(1))
