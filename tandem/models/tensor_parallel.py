# SPDX-License-Identifier: Apache-2.0
"""The decoder of one process of a layout: with fewer heads, a narrower feed-forward, fewer experts.

It is the decoder of a smaller config in which four linear maps of every layer, and the norms of
queries and keys, communicate with the peers. Column-parallel maps sum the gradients of their
inputs, and row-parallel maps sum their outputs. Every process holds embedding, other norms and head
whole, with whole gradients, and experts too unless expert parallelism divides them. Parameters have
the names of the unsharded decoder.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.models.adapted import AdaptedLinear, adapted_linear
from tandem.models.collectives import sum_gradients, sum_values
from tandem.models.decoder import Decoder, DecoderConfig, DecoderLayer
from tandem.models.expert_parallel import divide_experts
from tandem.models.latent_attention import LatentProjections
from tandem.models.operators import Operators
from tandem.models.parallel import ParallelLayout, Peers, local_config


def local_decoder(
    config: DecoderConfig, layout: ParallelLayout, *, operators: Operators
) -> Decoder:
    """Return the decoder of one process, on the meta device; ``config`` is the unsharded one's."""
    with torch.device("meta"):
        decoder = Decoder(local_config(config, layout.tensor.size), operators)
        for layer in cast(Iterable[DecoderLayer], decoder.layers):
            if layout.tensor.size > 1:
                _connect(layer, layout.tensor)
            if layout.expert.size > 1 and layer.experts is not None:
                divide_experts(layer.experts, layout)
        if layout.stage is not None:
            decoder.keep_stage(layout.stage)
    return decoder


def _connect(layer: DecoderLayer, peers: Peers) -> None:
    dense = ("gate_up", "down") if layer.experts is None else ()
    if isinstance(layer.qkv, LatentProjections):
        connect = partial(_ColumnParallel, peers=peers)
        layer.qkv.divide(connect, share=partial(sum_gradients, peers=peers))
    attention = ("o",) if isinstance(layer.qkv, LatentProjections) else ("qkv", "o")
    for name in (*attention, *dense):
        layer.register_module(
            name, _parallel(getattr(layer, name), peers, cuts_inputs=name in ("o", "down"))
        )
    if layer.q_norm is not None and layer.k_norm is not None:
        norm = _NormOverHeads if layer.norm_spans_heads else NormOfHeads
        layer.register_module("q_norm", norm(layer.q_norm, peers))
        layer.register_module("k_norm", norm(layer.k_norm, peers))


def _parallel(linear: nn.Module, peers: Peers, *, cuts_inputs: bool) -> nn.Module:
    if isinstance(linear, AdaptedLinear):
        adapted = _AdaptedRowParallel if cuts_inputs else _AdaptedColumnParallel
        return adapted(linear, peers)
    assert isinstance(linear, nn.Linear), "a map of a layer is plain or adapted"
    return (_RowParallel if cuts_inputs else _ColumnParallel)(linear, peers)


class _Parallel(nn.Module):
    """A part of a linear map."""

    def __init__(self, linear: nn.Linear, peers: Peers) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self._peers = peers


class _AdaptedParallel(nn.Module):
    """A part of a linear map with adapters."""

    def __init__(self, linear: AdaptedLinear, peers: Peers) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        self.lora_a, self.lora_b = linear.lora_a, linear.lora_b
        self._addition, self._peers = linear.addition, peers


class _ColumnParallel(_Parallel):
    """A linear map with some of the outputs, applied to inputs that every process holds."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return F.linear(sum_gradients(x_TD, self._peers), self.weight, self.bias)


class _AdaptedColumnParallel(_AdaptedParallel):
    """A column-parallel map with adapters: A is whole, and B has the rows of the outputs."""

    def forward(self, x_TD: Tensor) -> Tensor:
        return adapted_linear(
            sum_gradients(x_TD, self._peers),
            self.weight,
            bias_N=self.bias,
            lora_a_RD=sum_gradients(self.lora_a, self._peers),
            lora_b_Mr=self.lora_b,
            addition=self._addition,
        )


class _RowParallel(_Parallel):
    """A linear map with some of the inputs. The bias is added to the sum of the peers' outputs."""

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = sum_values(F.linear(x_TD, self.weight), self._peers)
        return y_TD if self.bias is None else y_TD + self.bias


class _AdaptedRowParallel(_AdaptedParallel):
    """A row-parallel map with adapters: A has the columns of the inputs, and B is whole."""

    def forward(self, x_TD: Tensor) -> Tensor:
        partial_TD = adapted_linear(
            x_TD,
            self.weight,
            bias_N=None,
            lora_a_RD=self.lora_a,
            lora_b_Mr=sum_gradients(self.lora_b, self._peers),
            addition=self._addition,
        )
        y_TD = sum_values(partial_TD, self._peers)
        return y_TD if self.bias is None else y_TD + self.bias


class NormOfHeads(nn.Module):
    """A norm that all heads share, applied to the heads of one process."""

    def __init__(self, norm: nn.RMSNorm, peers: Peers) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.eps
        self._peers = peers

    def forward(self, x_THE: Tensor) -> Tensor:
        weight_E = sum_gradients(self.weight, self._peers)
        return F.rms_norm(x_THE, weight_E.shape, weight_E, self._eps)


class _NormOverHeads(nn.Module):
    """A norm over all heads together, for the heads of one process: N = H E numbers of all."""

    def __init__(self, norm: nn.RMSNorm, peers: Peers) -> None:
        super().__init__()
        self.weight, self._eps = norm.weight, norm.eps
        self._peers = peers

    def forward(self, x_TN: Tensor) -> Tensor:
        wide_TN = x_TN.to(torch.promote_types(x_TN.dtype, torch.float32))
        squares_T1 = sum_values(wide_TN.square().sum(-1, keepdim=True), self._peers)
        # Each process scales its own heads by the sum: their gradients of it add up.
        mean_T1 = sum_gradients(squares_T1, self._peers) / (x_TN.shape[-1] * self._peers.size)
        scaled_TN = wide_TN * (mean_T1 + (self._eps or 0.0)).rsqrt()
        return scaled_TN.to(x_TN.dtype) * self.weight
