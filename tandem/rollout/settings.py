# SPDX-License-Identifier: Apache-2.0
"""What both native engines are told: the dense one of CPUs and the paged one of accelerators."""

from __future__ import annotations

from dataclasses import dataclass


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
