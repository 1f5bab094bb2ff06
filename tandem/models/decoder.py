# SPDX-License-Identifier: Apache-2.0
"""The decoder of Qwen2, Qwen3, Llama and families with experts, shared by trainer and rollout.

It maps T packed tokens to T hidden states after the final norm. Attention is an argument: training
passes a function over a packed batch, rollout a function over a KV cache. Query, key and value
weights are one matrix, gate and up another; Hugging Face names occur only in ``file_tensors.py``.
There are no sliding windows and no dropout.

Shapes: T tokens, D hidden, H query heads, K key/value heads, M = H + 2 K or H + K heads together,
E head dimension, F feed-forward, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from tandem.config.derived.experts import ExpertConfig
from tandem.config.derived.latent import LatentConfig
from tandem.config.derived.vision import VisionConfig
from tandem.models.adapted import AdaptedLinear, AdapterConfig, is_adapter
from tandem.models.experts import Experts, is_fixed, is_of_router
from tandem.models.gradient_sum import linear
from tandem.models.latent_attention import LatentProjections
from tandem.models.operators import TORCH, Angles, Attention, Operators
from tandem.models.rotary import RopeConfig, Rotary
from tandem.models.routing import Routing
from tandem.models.vision import Features, VisionTower, is_of_tower
from tandem.pictures import Picture

Stream = tuple[Tensor, Tensor | None]
"""The residual stream (T, D) and the output to add to it, None before the first layer."""

Granularity = Literal["pointwise", "feed_forward", "full"]
Recompute = Literal["nothing"] | Granularity
"""The part of a layer that the backward pass recomputes, with the same results. ``pointwise``:
norms and activation. ``feed_forward``: also the first product of the feed-forward. ``full``: the
whole layer; only its input is kept. With ``feed_forward``, a layer with experts recomputes both of
their products. With ``pointwise``, it recomputes nothing after its attention."""


@dataclass(frozen=True)
class DecoderConfig:
    """The architecture of a decoder."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    initializer_range: float
    # Not in ``repr``, which checkpoints hash with the parameters: these distinguish other models.
    has_value_head: bool = field(default=False, repr=False)
    """Whether the head computes one number, as in critics and reward models; it is never tied."""
    has_value_bias: bool = field(default=True, repr=False)
    """Whether a value head has a bias."""
    adapters: AdapterConfig | None = field(default=None, repr=False)
    """The adapters, which are then the only trained parameters; None trains all of them."""
    vision: VisionConfig | None = field(default=None, repr=False)
    """The vision tower; None for a model of text."""
    experts: ExpertConfig | None = field(default=None, repr=False)
    """The experts; None for a dense decoder."""
    norm_spans_heads: bool = field(default=False, repr=False)
    """Whether the norms of queries and keys are over all heads together, as in OLMoE."""
    latent: LatentConfig | None = field(default=None, repr=False)
    """The sizes of latent attention, which has as many key/value heads as heads; None for ordinary
    attention."""

    @property
    def rotary_dim(self) -> int:
        """The dimension of the vectors of which ``rope`` rotates a share."""
        return self.head_dim if self.latent is None else self.latent.rotated

    @property
    def freezes_tower(self) -> bool:
        """Whether there is a vision tower that training leaves as it is."""
        return self.vision is not None and self.vision.is_frozen

    def is_unsharded(self, name: str) -> bool:
        """Return whether all ranks hold a parameter whole, because training never changes it."""
        return is_fixed(name) or (self.freezes_tower and is_of_tower(name))

    def is_changed(self, name: str) -> bool:
        """Return whether an optimizer changes a parameter."""
        freezes_router = self.experts is not None and self.experts.freezes_router
        return not is_fixed(name) and not (freezes_router and is_of_router(name))

    def experts_at(self, index: int) -> ExpertConfig | None:
        """Return the experts of a layer; None if its feed-forward is dense."""
        experts = self.experts
        return None if experts is None or index in experts.dense_layers else experts


@dataclass(frozen=True, slots=True)
class View:
    """The pictures among packed tokens, on the device.

    Attributes:
        place_U: the indices into T of the tokens of pictures.
        row_U: the row of the features that each of them reads.
        pictures: what the tower looks at.
        features: what the tower saw before; None lets it look.
    """

    place_U: Tensor
    row_U: Tensor
    pictures: tuple[Picture, ...]
    features: Features | None = None


@dataclass(frozen=True, slots=True)
class Stage:
    """The consecutive layers that a process computes in pipeline parallelism.

    Attributes:
        rank, size: the number of this stage and of all stages.
        layers: the indices of its layers. The first stage also has the embedding, and the last one
            the final norm and the head. A tied embedding is in both.
        compute: the precision of the passes.
    """

    rank: int
    size: int
    layers: range
    compute: torch.dtype

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        return self.rank == self.size - 1


class _Linear(nn.Linear):
    """A linear map without hooks: looking them up takes as long as a small matrix product."""

    def __call__(self, x_TD: Tensor) -> Tensor:
        parameters = self._parameters
        return linear(x_TD, cast(Tensor, parameters["weight"]), bias_N=parameters["bias"])


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated feed-forward, each with a residual connection."""

    def __init__(self, config: DecoderConfig, index: int) -> None:
        super().__init__()
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        widths = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        connect = partial(_linear, config.adapters)
        self.index = index
        self.eps = eps
        self.head_split = (heads + kv_heads, kv_heads)
        self.qk_split = (heads, kv_heads)
        self.head_shape = (heads + 2 * kv_heads, head_dim)
        self.attention_norm = nn.RMSNorm(hidden, eps=eps)
        latent = config.latent
        if latent is None:
            self.qkv = connect(
                f"layers.{index}.qkv", num_inputs=hidden, widths=widths, bias=config.qkv_bias
            )
        else:
            self.qkv = LatentProjections(
                latent, hidden=hidden, num_heads=heads, has_bias=config.qkv_bias
            )
        self.norm_spans_heads = config.norm_spans_heads
        self.num_rotated = config.rope.num_rotated(config.rotary_dim)
        self.value_dim = head_dim if latent is None else latent.value
        q_width, k_width = widths[:2] if config.norm_spans_heads else (head_dim, head_dim)
        self.q_norm = nn.RMSNorm(q_width, eps=eps) if config.qk_norm else None
        self.k_norm = nn.RMSNorm(k_width, eps=eps) if config.qk_norm else None
        self.o = connect(
            f"layers.{index}.o",
            num_inputs=heads * self.value_dim,
            widths=(hidden,),
            bias=config.o_bias,
        )
        self.mlp_norm = nn.RMSNorm(hidden, eps=eps)
        experts = config.experts_at(index)
        self.experts = None if experts is None else Experts(experts, hidden)
        if experts is not None:
            return
        gate_up, down = f"layers.{index}.gate_up", f"layers.{index}.down"
        self.gate_up = connect(
            gate_up, num_inputs=hidden, widths=(inner, inner), bias=config.mlp_bias
        )
        self.down = connect(down, num_inputs=inner, widths=(hidden,), bias=config.mlp_bias)

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
        if self.experts is not None:
            feed_forward = partial(self._compute_experts, routing=routing)
        else:
            feed_forward = self._feed_forward
        if recompute in ("pointwise", "feed_forward"):
            x_TD, delta_TD = stream
            x_TD = x_TD if delta_TD is None else x_TD + delta_TD
            qkv_TD, _ = _recomputed(self._into_heads, x_TD, None, operators=operators)
        else:
            qkv_TD, x_TD = self._into_heads(*stream, operators=operators)
        o_TD = self._attend(qkv_TD, attention, angles=angles, operators=operators)
        if recompute == "feed_forward":
            return _recomputed(feed_forward, x_TD, o_TD, operators=operators)
        if recompute == "pointwise" and self.experts is None:
            gate_up_T2F, x_TD = _recomputed(self._into_gate, x_TD, o_TD, operators=operators)
            return x_TD, _recomputed(self._out_of_gate, gate_up_T2F, operators)
        return feed_forward(x_TD, o_TD, operators=operators)

    def _into_heads(
        self, x_TD: Tensor, delta_TD: Tensor | None, *, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return query, key and value in one tensor, and the stream."""
        weight_D = self.attention_norm.weight
        h_TD, x_TD = operators.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=self.eps)
        return self.qkv(h_TD), x_TD

    def _attend(
        self, qkv_TD: Tensor, attention: Attention, *, angles: Angles, operators: Operators
    ) -> Tensor:
        qk_TME, v_TKE = qkv_TD.view(-1, *self.head_shape).split(self.head_split, 1)
        if self.q_norm is not None:
            qk_TME = self._norm_heads(qk_TME, operators)
        rotated = self.num_rotated
        if rotated < self.head_shape[1]:
            turned = operators.rotate(qk_TME[..., :rotated].contiguous(), angles)
            qk_TME = torch.cat((turned, qk_TME[..., rotated:]), 2)
        else:
            qk_TME = operators.rotate(qk_TME, angles)
        q_THE, k_TKE = qk_TME.split(self.qk_split, 1)
        o_THE = attention(self.index, q_THE, k_TKE, v_TKE)
        if self.value_dim < self.head_shape[1]:
            o_THE = o_THE[..., : self.value_dim]
        return self.o(o_THE.flatten(1))

    def _norm_heads(self, qk_TME: Tensor, operators: Operators) -> Tensor:
        q_norm, k_norm = cast(nn.Module, self.q_norm), cast(nn.Module, self.k_norm)
        # Tensor-parallel processes have norms of their own, which sum gradients.
        if type(q_norm) is nn.RMSNorm and not self.norm_spans_heads:
            return operators.norm_heads(
                qk_TME,
                self.qk_split[0],
                q_weight_E=q_norm.weight,
                k_weight_E=cast(Tensor, k_norm.weight),
                eps=self.eps,
            )
        q_THE, k_TKE = qk_TME.split(self.qk_split, 1)
        if self.norm_spans_heads:
            q_TN, k_TN = q_norm(q_THE.flatten(1)), k_norm(k_TKE.flatten(1))
            return torch.cat((q_TN, k_TN), 1).view(-1, *qk_TME.shape[1:])
        return torch.cat((q_norm(q_THE), k_norm(k_TKE)), 1)

    def _feed_forward(self, x_TD: Tensor, o_TD: Tensor, *, operators: Operators) -> Stream:
        gate_up_T2F, x_TD = self._into_gate(x_TD, o_TD, operators=operators)
        return x_TD, self._out_of_gate(gate_up_T2F, operators)

    def _compute_experts(
        self, x_TD: Tensor, o_TD: Tensor, *, operators: Operators, routing: Routing | None
    ) -> Stream:
        assert self.experts is not None, "a dense layer has no experts"
        weight_D = self.mlp_norm.weight
        h_TD, x_TD = operators.add_norm(x_TD, o_TD, weight_D=weight_D, eps=self.eps)
        choose = None if routing is None else partial(routing, self.index)
        return x_TD, self.experts(h_TD, operators, choose=choose)

    def _into_gate(
        self, x_TD: Tensor, o_TD: Tensor, *, operators: Operators
    ) -> tuple[Tensor, Tensor]:
        """Return gate and up in one tensor, and the stream."""
        weight_D = self.mlp_norm.weight
        h_TD, x_TD = operators.add_norm(x_TD, o_TD, weight_D=weight_D, eps=self.eps)
        return self.gate_up(h_TD), x_TD

    def _out_of_gate(self, gate_up_T2F: Tensor, operators: Operators) -> Tensor:
        return self.down(operators.gate(gate_up_T2F))


class Decoder(nn.Module):
    """A decoder: embedding, layers, final norm and head.

    ``recompute`` and ``operators`` may be replaced after construction.
    """

    def __init__(self, config: DecoderConfig, operators: Operators = TORCH) -> None:
        super().__init__()
        self.config = config
        self.operators = operators
        self.recompute: Recompute = "nothing"
        self.stage: Stage | None = None
        self.rotary = Rotary(config.rope, config.rotary_dim)
        # With ``_weight``, torch draws no values, which on the meta device would import its
        # compiler and take 1 s.
        self.embedding = nn.Embedding(
            config.vocab_size,
            config.hidden_size,
            _weight=torch.empty(config.vocab_size, config.hidden_size),
        )
        self.layers = nn.ModuleList(DecoderLayer(config, i) for i in range(config.num_layers))
        self.final_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.lm_head = _head(config)
        self.tower = None if config.vision is None else VisionTower(config.vision)
        if config.adapters is not None:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_(is_adapter(name))

    def keep_stage(self, stage: Stage) -> None:
        """Drop all parameters but those of ``stage``. The others keep their names."""
        self.stage = stage
        for index in range(self.config.num_layers):
            if index not in stage.layers:
                delattr(self.layers, str(index))
        reads_embedding = stage.is_last and self.lm_head is None
        if not (stage.is_first or reads_embedding):
            del self.embedding
        if not stage.is_last:
            del self.final_norm
            self.lm_head = None

    @property
    def lm_head_weight(self) -> Tensor:
        """The weight of the head, (V, D), or (1, D) of a value head; the embedding if tied."""
        return self.embedding.weight if self.lm_head is None else self.lm_head.weight

    def forward(
        self,
        token_ids_T: Tensor,
        position_ids_T: Tensor,
        attention: Attention,
        *,
        view: View | None = None,
        routing: Routing | None = None,
        received_TD: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states (T, D) of T packed tokens after the final norm.

        ``routing`` sees or replaces the choices of routers. A stage returns the residual stream
        (T, D), unless it is the last, and takes that of the stage before it as ``received_TD``.

        Positions are (T,), or (T, 3) if pictures are among the tokens, which are then in ``view``.

        The residual stream is at least fp32, because every layer rounds it: in half precision, this
        caused a third of the difference between rollout's and trainer's log-probs (docs/adr/0003).

        The caller checks lengths (``rotary.require_length``), because reading positions here would
        make the host wait for the device.
        """
        stage = self.stage
        x_TD = self.embedding(token_ids_T) if received_TD is None else received_TD
        levels: tuple[Tensor, ...] = ()
        recompute: Recompute = self.recompute if torch.is_grad_enabled() else "nothing"
        if view is not None:
            x_TD, levels = self._look(x_TD, view, recomputes=recompute != "nothing")
        compute = x_TD.dtype if stage is None else stage.compute
        angles = self.rotary.angles(position_ids_T, compute)
        stream: Stream = (x_TD.to(torch.promote_types(x_TD.dtype, torch.float32)), None)
        for index, layer in enumerate(self.layers):
            run = partial(
                layer,
                angles=angles,
                operators=self.operators,
                recompute=recompute,
                routing=routing,
            )
            stream = (
                _recomputed(run, stream, attention)
                if recompute == "full"
                else run(stream, attention)
            )
            if view is not None and index < len(levels):
                level_UD = levels[index].to(stream[0].dtype)
                stream = (stream[0].index_add(0, view.place_U, level_UD), stream[1])
        x_TD, delta_TD = stream
        if stage is not None and not stage.is_last:
            # The first norm of the next stage would add them in the same precision.
            return x_TD if delta_TD is None else x_TD + delta_TD
        weight_D, eps = self.final_norm.weight, self.config.rms_norm_eps
        return self.operators.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=eps)[0]

    def _look(
        self, x_TD: Tensor, view: View, *, recomputes: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return embeddings with those of the pictures, and what is added behind first layers."""
        features = view.features
        if features is None:
            assert self.tower is not None, "pictures, and a model of text"
            features = self.tower(view.pictures, operators=self.operators, recomputes=recomputes)
        # F.embedding accumulates gradients of repeated rows deterministically.
        own_UD = F.embedding(view.row_U, features.embeddings).to(x_TD.dtype)
        levels = (F.embedding(view.row_U, level) for level in features.levels)
        return x_TD.index_copy(0, view.place_U, own_UD), tuple(levels)


def _linear(
    adapters: AdapterConfig | None,
    name: str,
    *,
    num_inputs: int,
    widths: tuple[int, ...],
    bias: bool,
) -> nn.Module:
    """Return a map of the layers, whose parts have ``widths`` outputs."""
    if adapters is not None and adapters.parts(name):
        return AdaptedLinear(num_inputs, widths, bias=bias, config=adapters, name=name)
    return _Linear(num_inputs, sum(widths), bias=bias)


def _head(config: DecoderConfig) -> nn.Linear | None:
    if config.has_value_head:
        return nn.Linear(config.hidden_size, 1, bias=config.has_value_bias)
    if config.tie_embeddings:
        return None
    return nn.Linear(config.hidden_size, config.vocab_size, bias=False)


def _recomputed(run: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    """Return ``run(*inputs, **settings)`` and keep only the inputs for the backward pass.

    The recomputation stops once it has all tensors that the backward pass reads, so a matrix
    product at the end is not repeated.
    """
    return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)


@cache
def parameter_shapes(config: DecoderConfig) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of the decoder's parameters, in order."""
    with torch.device("meta"):
        decoder = Decoder(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}
    return MappingProxyType(shapes)


def draw_parameter(
    name: str, parameter: Tensor, *, config: DecoderConfig, generator: torch.Generator
) -> None:
    """Draw values as transformers does: normal matrices, zero biases, unit norms."""
    if name.endswith(".bias") or is_fixed(name):
        parameter.zero_()
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(0.0, config.initializer_range, generator=generator)
