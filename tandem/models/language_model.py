# SPDX-License-Identifier: Apache-2.0
"""What engines know of a model, and its implementation by our own decoder.

The interface hides whose modelling code runs, and over how many processes it is spread: what a
model says of a packed batch comes from ``score_batch``, which all processes of the model's layout
call with the same batch. A policy says log-probs, a critic and a reward model values. Only a model
with a ``decoder`` can generate with the native rollout engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from tandem.models.decoder import Decoder, DecoderConfig, Granularity
from tandem.models.operators import Operators, upload
from tandem.models.parallel import (
    WHOLE,
    ParallelLayout,
    Regions,
    slices_of_rows,
    tensor_regions,
    whole_config,
)
from tandem.models.sequence_parallel import (
    UlyssesAttention,
    gather_responses,
    own_responses,
    own_tokens,
)
from tandem.models.tensor_parallel import local_decoder
from tandem.models.weights import allocate, copy_companions, save_hf_folder, write_config
from tandem.types import HeldSlice, PackedBatch


class LanguageModel(Protocol):
    """A causal language model, a critic or a reward model on one device, or one process's part.

    Shapes: T packed tokens, L those that this process computes, D hidden, V vocabulary.
    """

    @property
    def module(self) -> nn.Module:
        """Holds the parameters."""
        ...

    @property
    def decoder(self) -> Decoder | None:
        """Our decoder, None if transformers' modelling code is used."""
        ...

    @property
    def layout(self) -> ParallelLayout:
        """Which processes compute it together."""
        ...

    @property
    def family(self) -> str:
        """``model_type`` of config.json."""
        ...

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, D), differentiable: logits are ``hidden @ lm_head_weight.T``. With a value head its
        weight, (1, D)."""
        ...

    @property
    def value_head(self) -> nn.Linear | None:
        """(D) to one: what a critic or a reward model has in place of a language-model head."""
        ...

    @property
    def operators(self) -> Operators:
        """What computes log-probs from hidden states."""
        ...

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        """A copy on the same device in another precision, itself if it has that already."""
        ...

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Final hidden states (L, D) of a packed batch, which may lie on the CPU.

        L = T unless the layout shares out the tokens.
        """
        ...

    def set_gradient_checkpointing(self, enabled: bool, granularity: Granularity = "full") -> None:
        """Recompute activations in the backward pass, with the same results.

        Raises:
            UserError: the model cannot do so by this ``granularity``.
        """
        ...

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder into an existing folder.

        Args:
            dtype: of the file's weights; None keeps the module's.

        Raises:
            OSError: the disk is full or not writable.
        """
        ...


class NativeModel:
    """A ``LanguageModel`` of our own decoder.

    Attributes:
        device: where it computes. An engine that keeps the weights elsewhere sets it.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        hf_config: Mapping[str, Any],
        source: Path,
        layout: ParallelLayout = WHOLE,
    ) -> None:
        """Take over a decoder.

        Args:
            decoder: the part that is this process's in ``layout``.
            hf_config: the content of config.json.
            source: the folder it came from.
        """
        self.decoder = decoder
        self.layout = layout
        self.device = decoder.lm_head_weight.device
        self._hf_config = hf_config
        self._source = source

    @property
    def module(self) -> nn.Module:
        """The decoder."""
        return self.decoder

    @property
    def family(self) -> str:
        """``model_type`` of config.json."""
        return self.decoder.config.family

    @property
    def config(self) -> DecoderConfig:
        """Of the unsharded decoder."""
        return whole_config(self.decoder.config, self.layout.tensor.size)

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, D), the embedding itself when tied. With a value head (1, D)."""
        return self.decoder.lm_head_weight

    @property
    def value_head(self) -> nn.Linear | None:
        """That of a critic or a reward model."""
        return self.decoder.lm_head if self.decoder.config.has_value_head else None

    @property
    def operators(self) -> Operators:
        """The decoder's."""
        return self.decoder.operators

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        """A copy on the same device in another precision, itself if it has that already."""
        weight = self.decoder.lm_head_weight
        if weight.dtype == dtype:
            return self
        decoder = local_decoder(self.config, self.layout.tensor, operators=self.operators)
        allocate(decoder, dtype=dtype, device=weight.device)
        decoder.load_state_dict(self.decoder.state_dict())
        return NativeModel(
            decoder, hf_config=self._hf_config, source=self._source, layout=self.layout
        )

    def regions(self) -> dict[str, Regions]:
        """What this process holds of the unsharded decoder's tensors, by parameter."""
        tensor, dtype = self.layout.tensor, self.lm_head_weight.dtype
        return tensor_regions(self.config, rank=tensor.rank, size=tensor.size, dtype=dtype)

    def held_slices(self) -> list[HeldSlice]:
        """The same with their storage, unless an engine has cut the parameters further."""
        regions = self.regions()
        return [
            held
            for name, parameter in self.decoder.named_parameters()
            for held in slices_of_rows(regions[name], parameter)
        ]

    def unsharded(self, weights: Mapping[str, Tensor]) -> NativeModel:
        """The whole model with these weights of its own, such as to save it.

        Args:
            weights: the unsharded decoder's, by parameter.
        """
        with torch.device("meta"):
            decoder = Decoder(self.config, self.operators)
        decoder.load_state_dict(weights, assign=True)
        return NativeModel(decoder, hf_config=self._hf_config, source=self._source)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Final hidden states (L, D). Raises UserError if a sequence is too long for the model."""
        self.decoder.rotary.require_length(int(packed.position_ids_T.max()) + 1)
        token_ids, position_ids = packed.token_ids_T, packed.position_ids_T
        attention = self.operators.packed_attention(packed.segments, self.device)
        sequence = self.layout.sequence
        if sequence.size > 1:
            attention = UlyssesAttention(attention, sequence, num_tokens=len(token_ids))
            token_ids, position_ids = (own_tokens(x, sequence) for x in (token_ids, position_ids))
        return self.decoder(
            upload(token_ids, self.device), upload(position_ids, self.device), attention
        )

    def set_gradient_checkpointing(self, enabled: bool, granularity: Granularity = "full") -> None:
        """Recompute layers, or the parts of them that ``granularity`` names."""
        self.decoder.recompute = granularity if enabled else "nothing"

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder into an existing folder."""
        assert self.layout.tensor.size == 1, "a part of a model is no model folder: unsharded first"
        save_hf_folder(self.decoder, folder, dtype=dtype)
        write_config(self._hf_config, folder, dtype=dtype or self.decoder.embedding.weight.dtype)
        copy_companions(self._source, folder)


@dataclass(frozen=True)
class TokenScores:
    """What a model says of each response token, fp32 (R,).

    Attributes:
        score_R: a policy's log-prob, or the value of what stands before the token.
        entropy_R: None unless asked for; values have none.
    """

    score_R: Tensor
    entropy_R: Tensor | None


def score_batch(
    model: LanguageModel, batch: PackedBatch, *, temperature: float, with_entropy: bool
) -> TokenScores:
    """Log-probs of the response tokens of a packed batch, and their entropies if asked for; with a
    value head values, to which ``temperature`` is nothing.

    Each process of the model's layout gets all of them, differentiable with respect to what it
    computed itself: where the layout shares out the tokens, gradients of parameters are to be
    summed over those processes.
    """
    h_LD = model.hidden(batch)
    own = own_responses(batch, model.layout.sequence)
    # Responses to one prompt begin at the same row. What index_select would do on accelerators, add
    # up their gradients in the order of chance, embedding does in a fixed one.
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
    entropy_N = scores.entropy_R
    return TokenScores(
        gather_responses(scores.logp_R, own),
        None if entropy_N is None else gather_responses(entropy_N, own),
    )
