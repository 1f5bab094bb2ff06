# SPDX-License-Identifier: Apache-2.0
"""What both native engines are told and keep: the dense one of CPUs and the paged one of
accelerators."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tandem.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class NativeRolloutConfig:
    """How to run a native engine.

    Attributes:
        seed: with a sample id it determines every random number.
        eos_ids: tokens that end a response.
        max_num_seqs: sequences that run together.
        max_num_batched_tokens: prompt tokens of one prefill pass.
        max_cache_bytes: bound on keys and values; the dense engine reckons with the greatest
            length a row may reach.
        keeps_cache: what is cached of sequences under way stays when other weights come into use;
            else it is computed again.
    """

    seed: int
    eos_ids: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    max_cache_bytes: int
    keeps_cache: bool = False


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a cache holds of one token, and where."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, decoder: Decoder) -> CacheShape:
        """Of the tokens that ``decoder`` computes."""
        config, weight = decoder.config, decoder.lm_head_weight
        return cls(
            config.num_layers, config.num_kv_heads, config.head_dim, weight.dtype, weight.device
        )

    @property
    def bytes_per_token(self) -> int:
        """2 (key and value) x layers x heads x head dimension x bytes per number."""
        numbers = 2 * self.num_layers * self.num_kv_heads * self.head_dim
        return numbers * self.dtype.itemsize
