# SPDX-License-Identifier: Apache-2.0
"""The interface of models to engines, and its implementation by our own decoder.

The interface hides which modelling code runs, and on how many processes. All processes of the
model's layout call ``hidden`` with the same batch. Only a model with a ``decoder`` can
generate with the native rollout engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.models.adapted import base_weights, is_adapter, trained_parameters
from tandem.models.adapters import save_adapter
from tandem.models.decoder import Decoder, DecoderConfig, Granularity, View
from tandem.models.logprob import squared_probabilities
from tandem.models.operators import Operators, upload
from tandem.models.parallel import (
    WHOLE,
    ParallelLayout,
    Regions,
    slices_of_rows,
    tensor_regions,
    whole_config,
)
from tandem.models.routing import RecordedRoutes, ReplayedRoutes
from tandem.models.sequence_parallel import (
    UlyssesAttention,
    gather_responses,
    gather_tokens,
    own_range,
    own_responses,
    own_tokens,
)
from tandem.models.sight import Sight, own_sight, see, view_of
from tandem.models.tensor_parallel import local_decoder
from tandem.models.vision import smallest_picture
from tandem.models.weights import allocate, copy_companions, save_hf_folder, write_config
from tandem.types import HeldSlice, PackedBatch


class LanguageModel(Protocol):
    """A causal language model, a critic or a reward model, or this process's part of it.

    Shapes: T packed tokens, L tokens that this process computes, D hidden, V vocabulary.
    """

    @property
    def module(self) -> nn.Module:
        """The module that holds the parameters."""
        ...

    @property
    def decoder(self) -> Decoder | None:
        """Our decoder, or None if transformers' modelling code computes the model."""
        ...

    @property
    def layout(self) -> ParallelLayout:
        """The processes that compute the model together."""
        ...

    @property
    def family(self) -> str:
        """The ``model_type`` of config.json."""
        ...

    @property
    def lm_head_weight(self) -> Tensor:
        """The differentiable weight of the head, (V, D), or (1, D) of a value head.

        Logits are ``hidden @ lm_head_weight.T``.
        """
        ...

    @property
    def value_head(self) -> nn.Linear | None:
        """The head of a critic or a reward model, from D to 1; None for a language model."""
        ...

    @property
    def operators(self) -> Operators:
        """The operators that compute log-probs from hidden states."""
        ...

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        """Return a copy on the same device in another precision, or self if it has that one.

        Of a model with adapters only they are copied; the base is shared and keeps its precision.
        """
        ...

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Return the final hidden states (L, D) of a packed batch, which may be on the CPU.

        L = T unless the layout is sequence parallel.
        """
        ...

    def router_metrics(self) -> Mapping[str, Tensor]:
        """Return metrics of the routers in the latest pass; none for a model without experts."""
        ...

    def recorded_routes(self) -> Tensor | None:
        """Return the experts of all packed tokens, if the latest pass recorded them, (T, L, K).

        A pass records them if ``PackedBatch.with_routes`` asks for it.
        """
        ...

    def set_gradient_checkpointing(self, enabled: bool, granularity: Granularity = "full") -> None:
        """Recompute activations in the backward pass, with the same results.

        Raises:
            UserError: the model does not support this ``granularity``.
        """
        ...

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder into an existing folder.

        A model with adapters writes only them, in PEFT's form.

        Args:
            dtype: the precision of the file; None keeps the module's.

        Raises:
            OSError: the disk is full or not writable.
        """
        ...


class NativeModel:
    """A ``LanguageModel`` that our own decoder computes.

    Attributes:
        device: the device of the computation. An engine that stores the weights elsewhere sets it.
        looks_always: whether a tower that is trained runs in every pass, also without pictures, as
            peers that shard its weights must.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        hf_config: Mapping[str, Any],
        source: Path,
        layout: ParallelLayout = WHOLE,
    ) -> None:
        """Wrap ``decoder``, this process's part of the model in the folder ``source``."""
        self.decoder = decoder
        self.layout = layout
        self.device = next(decoder.parameters()).device
        self.looks_always = False
        self._hf_config = hf_config
        self._source = source
        self._routing: ReplayedRoutes | None = None
        self._recorded_TLK: Tensor | None = None

    @property
    def module(self) -> nn.Module:
        return self.decoder

    @property
    def family(self) -> str:
        return self.decoder.config.family

    @property
    def config(self) -> DecoderConfig:
        """The configuration of the unsharded decoder."""
        return whole_config(self.decoder.config, self.layout.tensor.size)

    @property
    def lm_head_weight(self) -> Tensor:
        return self.decoder.lm_head_weight

    @property
    def value_head(self) -> nn.Linear | None:
        return self.decoder.lm_head if self.decoder.config.has_value_head else None

    @property
    def operators(self) -> Operators:
        return self.decoder.operators

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        trained = trained_parameters(self.decoder)
        if next(iter(trained.values())).dtype == dtype:
            return self
        if self.config.adapters is not None:
            return self.with_own_adapters(dtype)
        decoder = local_decoder(self.config, self.layout, operators=self.operators)
        allocate(decoder, dtype=dtype, device=self.lm_head_weight.device)
        decoder.load_state_dict(self.decoder.state_dict())
        return self._around(decoder)

    def with_own_adapters(self, dtype: torch.dtype) -> NativeModel:
        """Return a model over the same base weights with a copy of the adapters in ``dtype``."""
        decoder = local_decoder(self.config, self.layout, operators=self.operators)
        copies = {
            name: parameter.detach().to(dtype, copy=True)
            for name, parameter in trained_parameters(self.decoder).items()
        }
        decoder.load_state_dict({**self.decoder.state_dict(), **copies}, assign=True)
        return self._around(decoder)

    def with_new_adapters(self, config: DecoderConfig, dtype: torch.dtype) -> NativeModel:
        """Return a model with the adapters of ``config`` over the same weights, uninitialized."""
        decoder = local_decoder(config, self.layout, operators=self.operators)
        device = self.lm_head_weight.device
        own = {
            name: torch.empty(parameter.shape, dtype=dtype, device=device)
            for name, parameter in decoder.named_parameters()
            if is_adapter(name)
        }
        decoder.load_state_dict({**self.decoder.state_dict(), **own}, assign=True)
        return self._around(decoder)

    def base(self) -> NativeModel:
        """Return the base without adapters, over the same storage."""
        config = replace(self.config, adapters=None)
        decoder = local_decoder(config, self.layout, operators=self.operators)
        decoder.load_state_dict(base_weights(self.decoder), assign=True)
        decoder.requires_grad_(False)
        return self._around(decoder)

    def _around(self, decoder: Decoder) -> NativeModel:
        tower, other = self.decoder.tower, decoder.tower
        is_same = tower is not None and other is not None and tower.dtype == other.dtype
        if is_same and decoder.config.freezes_tower:
            decoder.tower = tower  # with what it remembers of pictures
        return NativeModel(
            decoder, hf_config=self._hf_config, source=self._source, layout=self.layout
        )

    def regions(self) -> dict[str, Regions]:
        """Return the regions of the unsharded decoder that this process holds, by parameter."""
        tensor, dtype = self.layout.tensor, self.lm_head_weight.dtype
        return tensor_regions(
            self.config,
            rank=tensor.rank,
            size=tensor.size,
            dtype=dtype,
            experts=self.layout.expert,
        )

    def held_slices(self) -> list[HeldSlice]:
        """Return the regions with their storage, unless an engine has sharded them further."""
        regions = self.regions()
        return [
            held
            for name, parameter in self.decoder.named_parameters()
            for held in slices_of_rows(regions[name], parameter)
        ]

    def trained_slices(self) -> list[HeldSlice]:
        """Return ``held_slices`` of the trained parameters: of the adapters, if there are any."""
        trained = trained_parameters(self.decoder)
        return [held for held in self.held_slices() if held.spec.name in trained]

    def unsharded(self, weights: Mapping[str, Tensor]) -> NativeModel:
        """Return the whole model with the given weights of the unsharded decoder."""
        with torch.device("meta"):
            decoder = Decoder(self.config, self.operators)
        decoder.load_state_dict(weights, assign=True)
        return NativeModel(decoder, hf_config=self._hf_config, source=self._source)

    def hidden(self, packed: PackedBatch, received_LD: Tensor | None = None) -> Tensor:
        """Return the final hidden states (L, D), or a stage's: see ``Decoder.forward``.

        Raises:
            UserError: a sequence is too long.
        """
        self._routing = self._replay(packed)
        recorder = self._recorder(packed)
        self.decoder.rotary.require_length(int(packed.position_ids_T.max()) + 1)
        token_ids, position_ids = packed.token_ids_T, packed.position_ids_T
        sight = None
        if packed.pictures:
            sight = see(token_ids, position_ids, segments=packed.segments, pictures=packed.pictures)
            token_ids, position_ids = sight.token_ids_T, sight.position_T3
        view = self._view(sight, num_tokens=len(token_ids))
        attention = self.operators.packed_attention(packed.segments, self.device)
        sequence = self.layout.sequence
        if sequence.size > 1:
            attention = UlyssesAttention(attention, sequence, num_tokens=len(token_ids))
            token_ids, position_ids = (own_tokens(x, sequence) for x in (token_ids, position_ids))
        h_LD = self.decoder(
            upload(token_ids, self.device),
            upload(position_ids, self.device),
            attention,
            view=view,
            routing=recorder or self._routing,
            received_TD=received_LD,
        )
        self._recorded_TLK = None
        if recorder is not None and not recorder.is_empty:
            num_tokens = len(packed.token_ids_T)
            self._recorded_TLK = gather_tokens(recorder.routes(), sequence, num_tokens=num_tokens)
        return h_LD

    def _view(self, sight: Sight | None, *, num_tokens: int) -> View | None:
        """Return what this process sees of the pictures of a batch; None if it need not look."""
        vision = self.decoder.config.vision
        if sight is not None and self.layout.sequence.size > 1:
            sight = own_sight(sight, own_range(num_tokens, self.layout.sequence))
        if sight is not None and sight.pictures:
            return view_of(sight, self.device)
        if vision is None or vision.is_frozen or not self.looks_always:
            return None
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        return View(none, none, (smallest_picture(vision),))

    def router_metrics(self) -> Mapping[str, Tensor]:
        """Return metrics of the routers in the latest pass; none for a dense model."""
        return {} if self._routing is None else self._routing.metrics()

    def recorded_routes(self) -> Tensor | None:
        return self._recorded_TLK

    def _recorder(self, packed: PackedBatch) -> RecordedRoutes | None:
        experts = self.decoder.config.experts
        return RecordedRoutes(experts) if packed.with_routes and experts is not None else None

    def _replay(self, packed: PackedBatch) -> ReplayedRoutes | None:
        config, routes_TLK = self.decoder.config, packed.routes_TLK
        if config.experts is None or config.has_value_head or packed.with_routes:
            return None
        if routes_TLK is not None:
            if self.layout.sequence.size > 1:
                routes_TLK = own_tokens(routes_TLK, self.layout.sequence)
            routes_TLK = upload(routes_TLK, self.device)
        return ReplayedRoutes(config.experts, config.num_layers, routes_TLK=routes_TLK)

    def set_gradient_checkpointing(self, enabled: bool, granularity: Granularity = "full") -> None:
        self.decoder.recompute = granularity if enabled else "nothing"

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        layout = self.layout
        is_part = max(layout.tensor.size, layout.expert.size) > 1 or layout.stage is not None
        assert not is_part, "a part of a model cannot be saved: unshard it first"
        if self.config.adapters is not None:
            assert dtype is None, "adapters are written in their own precision"
            save_adapter(
                self.config,
                folder,
                adapters=trained_parameters(self.decoder),
                base=self._source,
            )
            return
        save_hf_folder(self.decoder, folder, dtype=dtype)
        write_config(self._hf_config, folder, dtype=dtype or self.decoder.embedding.weight.dtype)
        copy_companions(self._source, folder)


@dataclass(frozen=True)
class TokenScores:
    """The scores of each response token, fp32 (R,).

    Attributes:
        score_R: the log-probs of a policy, or the values of the states before the tokens.
        entropy_R: the entropies of a policy, if requested.
        squares_R: the sums of squared probabilities of a policy, without gradient, if requested.
    """

    score_R: Tensor
    entropy_R: Tensor | None
    squares_R: Tensor | None = None


def score_hidden(
    model: LanguageModel,
    batch: PackedBatch,
    *,
    h_LD: Tensor,
    temperature: float,
    with_entropy: bool,
) -> TokenScores:
    """Return log-probs of the response tokens from ``model.hidden(batch)``, and the entropies.

    A model with a value head returns values and ignores ``temperature``. Each process of the
    model's layout gets the scores of all tokens, differentiable with respect to its own
    computation. In a sequence-parallel layout, the caller sums the gradients of parameters over the
    processes.
    """
    own = own_responses(batch, model.layout.sequence)
    # Responses to one prompt start at the same row. F.embedding accumulates their gradients
    # deterministically; index_select does not on accelerators.
    h_ND = F.embedding(upload(own.source_N, h_LD.device), h_LD)
    head = model.value_head
    if head is not None:
        wide = torch.promote_types(h_ND.dtype, torch.float32)
        bias = head.bias.to(wide) if head.bias is not None else None
        values_N1 = F.linear(h_ND.to(wide), head.weight.to(wide), bias)
        return TokenScores(gather_responses(values_N1[:, 0], own), None)
    scores = model.operators.token_log_probs(
        h_ND,
        model.lm_head_weight,
        target_R=upload(own.target_N, h_LD.device),
        temperature=temperature,
        with_entropy=with_entropy,
    )
    squares_N = None
    if batch.with_squares:
        squares_N = squared_probabilities(h_ND, model.lm_head_weight, temperature=temperature)
    extras = (
        None if column_N is None else gather_responses(column_N, own)
        for column_N in (scores.entropy_R, squares_N)
    )
    return TokenScores(gather_responses(scores.logp_R, own), *extras)
