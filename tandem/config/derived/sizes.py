# SPDX-License-Identifier: Apache-2.0
"""The sizes of a decoder (config.json), which determine its memory and its parallel sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tandem.config.derived.experts import ExpertConfig, experts_of
from tandem.config.derived.latent import LatentConfig, latent_of
from tandem.config.derived.vision import text_part, vision_config
from tandem.config.schema.model import RecomputeGranularity
from tandem.errors import UserError

CACHE_PAGE_TOKENS = 64
"""The number of tokens in a page of the rollout engine's paged cache."""

OPTIMIZER_PART_NUMBERS = 1 << 28
"""The number of weights of a part, if weights or moments rest on the host and visit the device. A
larger matrix is a part of its own."""

_FULLEST = 1.5
"""The tokens of the fullest device relative to the mean, if experts are divided over devices and
their router is not balanced."""
_SIZE_KEYS = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """The sizes of a decoder.

    Attributes:
        inner: the width of the feed-forward of dense layers.
        experts: the experts of the other layers; None without any.
        adapters: the number of parameters of adapters, which are then the only trained ones; 0
            trains all weights.
        tower: the number of parameters of the vision tower; 0 for models of text.
        has_frozen_tower: whether the tower is not trained and each device holds it whole.
        latent: the sizes of latent attention; None for ordinary attention.
    """

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    adapters: int = 0
    experts: ExpertConfig | None = None
    tower: int = 0
    latent: LatentConfig | None = None
    has_frozen_tower: bool = False

    @classmethod
    def of(cls, hf_config: Mapping[str, Any]) -> ModelSizes | None:
        """Read the content of config.json; return None if it lacks a size."""
        vision = vision_config(hf_config)
        hf_config = text_part(hf_config)
        if not all(isinstance(hf_config.get(key), int) for key in (*_SIZE_KEYS, "vocab_size")):
            return None
        layers, hidden, inner, heads = (hf_config[key] for key in _SIZE_KEYS)
        latent, head_dim = latent_of(hf_config), hf_config.get("head_dim") or hidden // heads
        kv_heads = hf_config.get("num_key_value_heads") or heads
        return cls(
            num_layers=layers,
            hidden=hidden,
            inner=inner,
            num_heads=heads,
            num_kv_heads=kv_heads if latent is None else heads,
            head_dim=head_dim if latent is None else latent.head_dim,
            vocabulary=hf_config["vocab_size"],
            tied=bool(hf_config.get("tie_word_embeddings", False)),
            experts=experts_of(hf_config),
            tower=0 if vision is None else vision.num_parameters,
            latent=latent,
        )

    def of_largest_stage(self, stages: Sequence[range]) -> ModelSizes:
        """Return the sizes of the stage of layers with the most parameters.

        Every stage counts with one matrix of the size of the vocabulary, which the stages between
        the first and the last do not have.
        """
        if len(stages) == 1:
            return self
        return max(map(self._of_stage, stages), key=lambda stage: stage.num_parameters)

    def _of_stage(self, layers: range) -> ModelSizes:
        experts = self.experts
        if experts is not None:
            dense = (index - layers.start for index in experts.dense_layers if index in layers)
            experts = replace(experts, dense_layers=tuple(dense))
        return replace(
            self,
            num_layers=len(layers),
            tied=True,
            adapters=self.adapters * len(layers) // self.num_layers,
            experts=experts,
        )

    @property
    def num_expert_layers(self) -> int:
        """The number of layers with experts."""
        return 0 if self.experts is None else self.num_layers - len(self.experts.dense_layers)

    @property
    def dense_layer_parameters(self) -> int:
        """The number of parameters of the matrices of a dense layer; the rest is below a
        thousandth.
        """
        return self._attention_parameters + 3 * self.hidden * self.inner

    def expert_layer_parameters(self, num_experts: int) -> int:
        """Return the number of parameters of a layer of which ``num_experts`` experts count."""
        experts = self.experts
        assert experts is not None, "the model has no experts"
        width = 3 * (num_experts * experts.inner + experts.shared_inner) + experts.num_experts
        return self._attention_parameters + self.hidden * (width + experts.has_shared_gate)

    @property
    def routed_layer_parameters(self) -> int:
        """The number of parameters of the routed experts of a layer; 0 without any."""
        experts = self.experts
        return 0 if experts is None else 3 * self.hidden * experts.inner * experts.num_experts

    @property
    def all_layer_parameters(self) -> int:
        """The number of parameters of all layers."""
        experts = self.experts
        return self._layers_with(0 if experts is None else experts.num_experts)

    @property
    def active_layer_parameters(self) -> int:
        """The number of parameters of all layers that compute a token."""
        experts = self.experts
        return self._layers_with(0 if experts is None else experts.num_chosen)

    @property
    def _attention_parameters(self) -> int:
        if self.latent is not None:
            return self.latent.num_parameters(self.hidden, self.num_heads)
        return self.hidden * (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def _layers_with(self, num_experts: int) -> int:
        sparse = self.num_expert_layers
        total = (self.num_layers - sparse) * self.dense_layer_parameters
        return total + (sparse * self.expert_layer_parameters(num_experts) if sparse else 0)

    @property
    def quantized_parameters(self) -> int:
        """The number of parameters that a rollout in fp8 copies: all matrices of the layers but the
        output projections of attention.
        """
        projections = self.num_layers * self.hidden * self.num_heads * self.head_dim
        return self.all_layer_parameters - projections

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters of the embedding and, if it is another matrix, of the head."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden

    @property
    def visiting_parameters(self) -> int:
        """The most weights that are on the device for an optimizer's step by parts: one part that
        is stepped, the next one and the last one.
        """
        # Gate and up of the experts of a layer are one matrix, as large in every layer.
        experts = max(OPTIMIZER_PART_NUMBERS, 2 * self.routed_layer_parameters // 3)
        largest = max(experts, self.vocabulary * self.hidden)
        return min(self.num_parameters, largest + experts + OPTIMIZER_PART_NUMBERS)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of layers, embedding, head and vision tower."""
        return self.all_layer_parameters + self.embedding_parameters + self.tower

    @property
    def num_trained(self) -> int:
        """The number of trained parameters."""
        return self.adapters or self.num_parameters - self.frozen_tower

    @property
    def frozen_tower(self) -> int:
        """The number of parameters of a vision tower that each device holds whole."""
        return self.tower if self.has_frozen_tower else 0

    @property
    def cache_numbers_per_token(self) -> int:
        """The cached numbers per token: 2 (key and value) x layers x heads x head dimension."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    def layer_numbers_per_token(self, tensor_parallel: int = 1, *, expert_parallel: int = 1) -> int:
        """Return how many half-precision numbers the largest layer has per token at a time, in its
        forward or backward pass.

        They are the two residual sums in fp32 (4 D) and their norms (2 D); query, key and value
        before and after rotation; the attention output; gate, up and their product. Tensor
        parallelism splits all but sums, norms and experts. For each chosen expert these are the
        row that it reads, gate and up, their product, and its output in both precisions, or what
        its backward pass computes of them. If experts are divided, these are the numbers of the
        fullest device. Latent attention also has its narrow vectors and their norms.
        """
        dense = self._kept_outside(tensor_parallel) + 3 * self.inner // tensor_parallel
        experts = self.experts
        if experts is None:
            return dense
        sparse = self._kept_outside(tensor_parallel) + self._held_by_experts(expert_parallel)
        return max(sparse, dense) if experts.dense_layers else sparse

    def _kept_outside(self, tensor_parallel: int) -> int:
        heads = 3 * self.num_heads + 3 * self.num_kv_heads
        latent = 0 if self.latent is None else self.latent.kept_numbers
        return 6 * self.hidden + latent + heads * self.head_dim // tensor_parallel

    def _held_by_experts(self, expert_parallel: int) -> int:
        """Return the numbers of a token in the experts of a layer that is being computed."""
        experts = self.experts
        assert experts is not None, "the model has no experts"
        forward = 4 * self.hidden + 4 * experts.inner
        backward = 2 * self.hidden + 8 * experts.inner
        routed = experts.num_chosen * max(forward, backward)
        routed = int(_FULLEST * routed) if expert_parallel > 1 else routed
        return routed + self._numbers_beside_experts

    def _kept_by_experts(self, expert_parallel: int) -> int:
        """Return the numbers of a token that the experts of a layer keep for its backward pass.

        They are gate and up of each chosen one. If experts are divided, the rows that are received
        are kept, too.
        """
        experts = self.experts
        assert experts is not None, "the model has no experts"
        routed = experts.num_chosen * 2 * experts.inner
        if expert_parallel > 1:
            routed = int(_FULLEST * experts.num_chosen * (self.hidden + 2 * experts.inner))
        return routed + self._numbers_beside_experts

    @property
    def _numbers_beside_experts(self) -> int:
        """The router's scores, places and weights of the chosen experts, and the numbers of the
        shared expert.
        """
        experts = self.experts
        assert experts is not None, "the model has no experts"
        routing = 2 * experts.num_experts + 14 * experts.num_chosen
        return routing + 4 * experts.shared_inner

    def kept_numbers_per_token(
        self,
        recomputed: RecomputeGranularity | None,
        *,
        tensor_parallel: int = 1,
        expert_parallel: int = 1,
        num_batches: int = 1,
    ) -> int:
        """Return how many half-precision numbers a whole backward pass keeps per token.

        ``num_batches`` micro-batches have had their forward pass and not their backward pass.

        Without ``recomputed`` these are the numbers of all layers. With it, each layer keeps only
        the residual stream in fp32, one sum and the parts that are not recomputed; one layer at a
        time is complete.
        """
        whole = self.layer_numbers_per_token(tensor_parallel, expert_parallel=expert_parallel)
        sparse = self.num_expert_layers
        dense = self.num_layers - sparse
        if recomputed is None:
            kept = self._kept_outside(tensor_parallel)
            own = dense * (kept + 3 * self.inner // tensor_parallel)
            if not sparse:
                return num_batches * own
            by_experts = self._kept_by_experts(expert_parallel)
            computed = self._held_by_experts(expert_parallel) - by_experts
            return num_batches * (own + sparse * (kept + by_experts)) + max(0, computed)
        heads = 3 * (self.num_heads + self.num_kv_heads) * self.head_dim // tensor_parallel
        gate_up = 2 * self.inner // tensor_parallel
        split = {"full": 0, "feed_forward": heads, "pointwise": heads}[recomputed]
        kept = self.num_layers * (3 * self.hidden + split)
        if recomputed == "pointwise":
            kept += dense * gate_up
            if sparse:
                # With the sum in fp32 before their norm, which is not computed again.
                kept += sparse * (2 * self.hidden + self._kept_by_experts(expert_parallel))
        return num_batches * kept + whole


def division_errors(
    num_heads: int, num_kv_heads: int, *, inner: int, tensor: int, sequence: int, section: str
) -> Iterator[UserError]:
    """Yield the errors in dividing a dense decoder over processes.

    Args:
        num_heads, num_kv_heads: the numbers of attention heads and of key/value heads.
        inner: the width of its feed-forward layers.
        tensor, sequence: the parallel sizes, which are keys of ``section``.
    """
    whole = (num_heads, num_kv_heads, inner)
    tensors = [n for n in range(1, num_kv_heads + 1) if not any(size % n for size in whole)]
    if tensor not in tensors:
        yield UserError(
            f"{section}.tensor_model_parallel_size",
            tensor,
            rule=f"it must divide the model's {num_heads} attention heads, {num_kv_heads} "
            f"key/value heads and feed-forward width of {inner}",
            remedy=f"Use {_choice(tensors)}.",
        )
        return
    heads, kv_heads = num_heads // tensor, num_kv_heads // tensor
    sequences = [
        n for n in range(1, heads + 1) if not heads % n and not (kv_heads % n and n % kv_heads)
    ]
    if sequence not in sequences:
        yield UserError(
            f"{section}.ulysses_sequence_parallel_size",
            sequence,
            rule=f"it must divide the {heads} attention heads of a process, and divide its "
            f"{kv_heads} key/value heads or be a multiple of them",
            remedy=f"Use {_choice(sequences)}.",
        )


def _choice(sizes: Sequence[int]) -> str:
    return " or ".join(map(str, sizes))
