# SPDX-License-Identifier: Apache-2.0
"""Latent attention of a model, read from config.json (DeepSeek-AI, 2024, arXiv:2405.04434).

Keys and values of all heads are linear maps of one narrow vector a token, the latent vector. One
more vector a token, which is rotated by the position, is part of the keys of all heads. The file
does not import torch; ``models.latent_attention`` computes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.config.derived.model_types import rope_kind, rope_settings
from tandem.config.derived.model_values import require_size

LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3")


@dataclass(frozen=True, slots=True)
class LatentConfig:
    """The sizes of latent attention.

    Attributes:
        query_rank: the width of the vector from which the queries of all heads are computed; None
            if they are computed from the layer's input.
        key_rank: the width of the latent vector.
        plain, rotated: the dimensions of each head's queries and keys that are not rotated, and
            those that are.
        value: the dimension of each head's values.
        interleaves: whether the two numbers that are rotated together are neighbours.
        score_scale: the factor of attention's scores beside ``1 / sqrt(plain + rotated)``.
    """

    key_rank: int
    plain: int
    rotated: int
    value: int
    query_rank: int | None = None
    interleaves: bool = True
    score_scale: float = 1.0

    @property
    def query(self) -> int:
        """The dimension of each head's queries and keys."""
        return self.plain + self.rotated

    @property
    def head_dim(self) -> int:
        """The dimension in which attention computes: queries, keys or values are padded to it."""
        return max(self.query, self.value)

    @property
    def kept_numbers(self) -> int:
        """The numbers of narrow vectors per token that a layer keeps for its backward pass."""
        return 2 * (self.query_rank or 0) + 2 * self.key_rank + self.rotated

    def num_parameters(self, hidden: int, num_heads: int) -> int:
        """Return the number of parameters of the matrices of a layer's attention."""
        source = self.query_rank or hidden
        queries = source * num_heads * self.query
        queries += 0 if self.query_rank is None else hidden * self.query_rank
        keys = hidden * (self.key_rank + self.rotated)
        values = self.key_rank * num_heads * (self.plain + self.value)
        return queries + keys + values + num_heads * self.value * hidden


def latent_of(hf_config: Mapping[str, Any]) -> LatentConfig | None:
    """Return the latent attention of a model; None if its family has ordinary attention.

    Args:
        hf_config: the content of config.json.

    Raises:
        UserError: a size is missing.
    """
    if hf_config.get("model_type") not in LATENT_FAMILIES:
        return None
    has_query_rank = hf_config.get("q_lora_rank") is not None
    return LatentConfig(
        key_rank=require_size(hf_config, "kv_lora_rank"),
        plain=require_size(hf_config, "qk_nope_head_dim"),
        rotated=require_size(hf_config, "qk_rope_head_dim"),
        value=require_size(hf_config, "v_head_dim"),
        query_rank=require_size(hf_config, "q_lora_rank") if has_query_rank else None,
        # DeepSeek-V2 always does, and has no such key.
        interleaves=bool(hf_config.get("rope_interleave", True)),
        score_scale=_score_scale(hf_config),
    )


def _score_scale(hf_config: Mapping[str, Any]) -> float:
    """Return the square of YaRN's factor for all dimensions, by which DeepSeek scales scores."""
    parameters = rope_settings(hf_config)
    scale, factor = parameters.get("mscale_all_dim"), parameters.get("factor") or 1.0
    if rope_kind(hf_config) == "default" or not scale or factor <= 1:
        return 1.0
    return (0.1 * scale * math.log(factor) + 1.0) ** 2
