# SPDX-License-Identifier: Apache-2.0
"""Layers of megatron-core in tandem's decoder, for ``megatron.backend=mcore``.

Embedding, final norm, head, sharding, optimizer and schedule stay tandem's. Megatron computes the
layers and communicates between tensor-parallel ranks. Its attention takes rows of equal length: a
packed batch is padded, and a prompt is repeated for each of its samples. Megatron keeps the heads
of query, key and value by group, which ``shards`` knows. Packed rows, experts and context
parallelism of Megatron need Transformer Engine, which is not used.

Shapes: T packed tokens, S tokens of the longest row, B rows, D hidden, E head dimension.
"""

from __future__ import annotations

import sys
import warnings
from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812

from tandem.engines.mindspeed import adapt_megatron
from tandem.errors import UserError
from tandem.models.decoder import Decoder, DecoderConfig, DecoderLayer, Recompute, Stream
from tandem.models.operators import Angles, Attention, Operators
from tandem.models.parallel import ParallelLayout, Peers
from tandem.models.routing import Routing
from tandem.models.tensor_parallel import NormOfHeads
from tandem.types import Segments


class PaddedRows:
    """A packed batch as rows of equal length: every segment after its prefix."""

    def __init__(self, segments: Segments, device: torch.device | str = "cpu") -> None:
        columns = (
            segments.start_S,
            segments.length_S,
            segments.prefix_start_S,
            segments.prefix_length_S,
        )
        rows = np.stack([column.numpy() for column in columns], 1)
        longest = int((rows[:, 1] + rows[:, 3]).max())
        source_SB = np.zeros((longest, len(rows)), dtype=np.int64)
        place_T = np.empty(int(rows[:, 1].sum()), dtype=np.int64)
        for row, (start, length, prefix_start, prefix) in enumerate(rows):
            source_SB[:prefix, row] = np.arange(prefix_start, prefix_start + prefix)
            source_SB[prefix : prefix + length, row] = np.arange(start, start + length)
            place_T[start : start + length] = np.arange(prefix, prefix + length) * len(rows) + row
        self._source_SB = torch.from_numpy(source_SB).to(device)
        self._place_T = torch.from_numpy(place_T).to(device)
        hidden_SS = torch.ones(longest, longest, dtype=torch.bool, device=device).triu(1)
        self.hidden_11SS = hidden_SS[None, None]

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        raise AssertionError("Megatron's layers attend by themselves")

    def pad(self, x_TD: Tensor) -> Tensor:
        """Return the rows, (S, B, D). Padding repeats the first token; its results are ignored."""
        return F.embedding(self._source_SB, x_TD)

    def pack(self, x_SBD: Tensor) -> Tensor:
        """Return the tokens of rows, (T, D), each from its own segment."""
        return F.embedding(self._place_T, x_SBD.flatten(0, 1))


class MegatronLayer(nn.Module):
    """A layer of megatron-core with the calls and the names of parameters of ``DecoderLayer``."""

    def __init__(self, layer: Any, frequencies_E: Tensor, *, peers: Peers) -> None:
        super().__init__()
        attention, feed_forward = layer.self_attention, layer.mlp
        self.attention_norm = layer.input_layernorm
        self.qkv = attention.linear_qkv
        has_norms = layer.config.qk_layernorm
        if has_norms and peers.size > 1:
            # Megatron sums the gradients of these norms at the end of a step, in code of its own.
            attention.q_layernorm = NormOfHeads(attention.q_layernorm, peers)
            attention.k_layernorm = NormOfHeads(attention.k_layernorm, peers)
        self.q_norm = attention.q_layernorm if has_norms else None
        self.k_norm = attention.k_layernorm if has_norms else None
        self.o = attention.linear_proj
        self.mlp_norm = layer.pre_mlp_layernorm
        self.gate_up = feed_forward.linear_fc1
        self.down = feed_forward.linear_fc2
        self.experts = None
        self._frequencies_E = frequencies_E
        # Not a submodule: its parameters are named above.
        self._layer = (layer,)

    def forward(
        self,
        stream: Stream,
        attention: Attention,
        *,
        angles: Angles,
        operators: Operators,
        recompute: Recompute = "nothing",
        routing: Routing | None = None,
    ) -> Stream:
        """Apply the layer to T tokens. The caller implements ``recompute="full"``."""
        assert isinstance(attention, PaddedRows), "open_fsdp_model sets the operators"
        x_TD, delta_TD = stream
        x_TD = x_TD if delta_TD is None else x_TD + delta_TD
        x_SBD = attention.pad(x_TD.to(self.qkv.weight.dtype))
        if self._frequencies_E.device != x_SBD.device:
            self._frequencies_E = self._frequencies_E.to(x_SBD.device)
        position_S = torch.arange(len(x_SBD), device=x_SBD.device, dtype=torch.float32)
        angle_S11E = (position_S[:, None] * self._frequencies_E)[:, None, None]
        y_SBD, _ = self._layer[0](
            x_SBD, attention_mask=attention.hidden_11SS, rotary_pos_emb=angle_S11E
        )
        return attention.pack(y_SBD).to(x_TD.dtype), None


def use_megatron_layers(
    decoder: Decoder, layout: ParallelLayout, *, key: str, adaptor: str = ""
) -> None:
    """Replace the layers of a decoder on the meta device. Collective over the default world.

    Args:
        key: the key that asks for them, for messages.
        adaptor: the package that lets megatron-core compute on the device; "" if it does by itself.

    Raises:
        UserError: megatron-core's own modules do not compute the model.
    """
    config = decoder.config
    if (
        config.experts is not None
        or config.latent is not None
        or config.vision is not None
        or config.adapters is not None
        or config.o_bias
        or config.mlp_bias
        or config.norm_spans_heads
        or config.rope.share != 1.0
        or decoder.rotary.scale != 1.0
    ):
        raise UserError(
            key,
            "mcore",
            rule=f"megatron-core's own modules do not compute this {config.family} model here",
            remedy="Set it to native.",
        )
    size = layout.tensor.size
    _join_groups(size, adaptor=adaptor)
    # The decoder's config has this rank's heads; Megatron divides those of the whole model.
    settings = _settings(config, size)
    with torch.device("meta"):
        for name, layer in decoder.layers.named_children():
            assert isinstance(layer, DecoderLayer), "the layers are replaced once"
            own = MegatronLayer(
                _build(settings, layer.index), decoder.rotary.frequencies, peers=layout.tensor
            )
            decoder.layers.register_module(name, own)
    decoder.operators = replace(decoder.operators, packed_attention=PaddedRows)


def _join_groups(tensor: int, *, adaptor: str) -> None:
    """Let the adaptor work, and form Megatron's groups, of which a process has one set."""
    if adaptor and f"{adaptor}.megatron_adaptor" not in sys.modules:
        adapt_megatron(adaptor)
    parallel_state = _core("parallel_state")
    if parallel_state.is_initialized():
        formed = parallel_state.get_tensor_model_parallel_world_size()
        if formed != tensor:
            raise UserError(
                "tensor_model_parallel_size",
                tensor,
                rule=f"Megatron's groups of this process are of {formed} ranks already",
                remedy="Give all models of a pool the same tensor_model_parallel_size.",
            )
        return
    world = distributed.group.WORLD
    assert world is not None, "a rank of a pool has joined its world"
    timeout = world._get_backend(torch.device("cpu")).options._timeout
    parallel_state.initialize_model_parallel(
        tensor,
        expert_tensor_parallel_size=1,  # experts are refused with megatron-core
        distributed_timeout_minutes=max(1, round(timeout.total_seconds() / 60)),
    )
    random = _core("tensor_parallel.random")
    random.model_parallel_cuda_manual_seed(0)  # its attention forks a generator, and draws nothing


def _settings(config: DecoderConfig, size: int) -> Any:
    return _core("transformer.transformer_config").TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads * size,
        num_query_groups=config.num_kv_heads * size,
        kv_channels=config.head_dim,
        ffn_hidden_size=config.intermediate_size * size,
        tensor_model_parallel_size=size,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=config.qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=config.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=torch.float32,
        attention_softmax_in_fp32=True,
        # These need Apex, Transformer Engine or a compiler.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
    )


def _build(settings: Any, index: int) -> Any:
    spec = _core("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
        qk_layernorm=settings.qk_layernorm, normalization=settings.normalization
    )
    return _core("transformer.spec_utils").build_module(
        spec, config=settings, layer_number=index + 1
    )


def _core(name: str) -> Any:
    with warnings.catch_warnings(action="ignore"):  # about packages that are not installed
        return import_module(f"megatron.core.{name}")
