# SPDX-License-Identifier: Apache-2.0
"""What engines know of a model, and its implementation by our own decoder.

The interface hides whose modelling code runs: ``hidden`` takes a packed batch, and log-probs follow
from it with ``lm_head_weight`` through ``score_batch``. Only a model with a ``decoder``
can generate with the native rollout engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tandem.models.decoder import Decoder
from tandem.models.logprob import TokenLogProbs
from tandem.models.operators import Operators
from tandem.models.weights import allocate, copy_companions, save_hf_folder, write_config
from tandem.types import PackedBatch


class LanguageModel(Protocol):
    """A causal language model on one device.

    Shapes: T packed tokens, D hidden, V vocabulary.
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
    def family(self) -> str:
        """``model_type`` of config.json."""
        ...

    @property
    def lm_head_weight(self) -> Tensor:
        """(V, D), differentiable: logits are ``hidden @ lm_head_weight.T``."""
        ...

    @property
    def num_parameters(self) -> int:
        """Tied weights count once."""
        ...

    @property
    def operators(self) -> Operators:
        """What computes log-probs from hidden states."""
        ...

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        """A copy on the same device in another precision, itself if it has that already."""
        ...

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Final hidden states (T, D) of a packed batch, which may lie on the CPU."""
        ...

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute activations in the backward pass, with the same results."""
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
    """A ``LanguageModel`` of our own decoder."""

    def __init__(self, decoder: Decoder, *, hf_config: Mapping[str, Any], source: Path) -> None:
        """``hf_config`` is the content of config.json and ``source`` the folder it came from."""
        self.decoder = decoder
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
    def lm_head_weight(self) -> Tensor:
        """(V, D), the embedding itself when tied."""
        return self.decoder.lm_head_weight

    @property
    def num_parameters(self) -> int:
        """Tied weights count once."""
        return count_parameters(self.decoder)

    @property
    def operators(self) -> Operators:
        """The decoder's."""
        return self.decoder.operators

    def in_dtype(self, dtype: torch.dtype) -> LanguageModel:
        """A copy on the same device in another precision, itself if it has that already."""
        weight = self.decoder.lm_head_weight
        if weight.dtype == dtype:
            return self
        with torch.device("meta"):
            decoder = Decoder(self.decoder.config, self.decoder.operators)
        allocate(decoder, dtype=dtype, device=weight.device)
        decoder.load_state_dict(self.decoder.state_dict())
        return NativeModel(decoder, hf_config=self._hf_config, source=self._source)

    def hidden(self, packed: PackedBatch) -> Tensor:
        """Final hidden states (T, D). Raises UserError if a sequence is too long for the model."""
        self.decoder.rotary.require_length(int(packed.position_ids_T.max()) + 1)
        device = self.decoder.embedding.weight.device
        return self.decoder(
            packed.token_ids_T.to(device),
            packed.position_ids_T.to(device),
            self.decoder.operators.packed_attention(packed.segments, device),
        )

    def set_gradient_checkpointing(self, enabled: bool) -> None:
        """Recompute each layer in the backward pass."""
        self.decoder.gradient_checkpointing = enabled

    def save(self, folder: Path, dtype: torch.dtype | None = None) -> None:
        """Write a complete Hugging Face folder into an existing folder."""
        save_hf_folder(self.decoder, folder, dtype=dtype)
        write_config(self._hf_config, folder, dtype=dtype or self.decoder.embedding.weight.dtype)
        copy_companions(self._source, folder)


def score_batch(
    model: LanguageModel, batch: PackedBatch, *, temperature: float, with_entropy: bool
) -> TokenLogProbs:
    """Log-probs of the response tokens (R,) of a packed batch, and their entropies if asked for."""
    h_TD = model.hidden(batch)
    return model.operators.token_log_probs(
        h_TD.index_select(0, batch.source_R.to(h_TD.device)),
        model.lm_head_weight,
        target_R=batch.target_R.to(h_TD.device),
        temperature=temperature,
        with_entropy=with_entropy,
    )


def count_parameters(module: nn.Module) -> int:
    """Tied weights count once."""
    return sum(parameter.numel() for parameter in module.parameters())
