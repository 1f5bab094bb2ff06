# SPDX-License-Identifier: Apache-2.0
"""Settings and limits that the dense and the paged engine share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tandem.models.decoder import Decoder
from tandem.models.operators import Attention


@dataclass(frozen=True, slots=True)
class NativeRolloutConfig:
    """The settings of a native engine.

    Attributes:
        seed: the seed, which with a sample id determines each random number.
        eos_ids: tokens that end a response.
        max_num_seqs: the maximum number of running sequences.
        max_num_batched_tokens: the maximum number of prompt tokens of one prefill pass.
        max_cache_bytes: a bound on keys and values. The dense engine counts every row at the
            greatest length that one of them may reach.
        keeps_cache: whether unfinished sequences keep their cached keys and values after a weight
            update. Otherwise they are recomputed.
        records_routes: whether completions have the experts of their tokens.
        keeps_turns: whether a sample that waits for another turn keeps its keys and values, so that
            the turn computes new tokens only.
    """

    seed: int
    eos_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cache_bytes: int
    keeps_cache: bool = False
    records_routes: bool = False
    keeps_turns: bool = True

    @property
    def limits(self) -> Limits:
        """The bounds of a scheduler."""
        return Limits(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds of a scheduler.

    Attributes:
        max_rows: the maximum number of running sequences.
        max_prefill_tokens: the maximum number of prompt tokens of one prefill pass. A longer one
            gets its own pass.
    """

    max_rows: int
    max_prefill_tokens: int


class Substitute(Protocol):
    """A substitute for an engine's decoder, which computes with that decoder's weights."""

    def __call__(self, token_ids_T: Tensor, position_ids_T: Tensor, attention: Attention) -> Tensor:
        """Return the hidden states (T, D) of packed tokens after the final norm."""
        ...

    def outdate(self) -> None:
        """Note that the decoder's weights have changed."""
        ...

    def update(self) -> None:
        """Take the decoder's weights if they have changed; called before passes."""
        ...

    def free(self) -> None:
        """Free memory that ``update`` allocates again."""
        ...


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The shape, dtype and device of one token's keys and values."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, decoder: Decoder) -> CacheShape:
        """Return the shape of ``decoder``'s keys and values."""
        config, weight = decoder.config, decoder.lm_head_weight
        return cls(
            config.num_layers, config.num_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of a token: 2 (key and value) x layers x heads x head dimension x itemsize."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return numbers * self.dtype.itemsize
