# SPDX-License-Identifier: Apache-2.0
"""A random decoder so small that a test can generate with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tandem.models.decoder import Decoder, DecoderConfig, RopeConfig, draw_parameter

CONFIG = DecoderConfig(
    family="qwen2",
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=RopeConfig(10_000.0),
    max_position_embeddings=256,
    tie_embeddings=True,
    qkv_bias=True,
    o_bias=False,
    mlp_bias=False,
    qk_norm=False,
    initializer_range=0.25,
)
"""Weights large enough for variety."""


def tiny_decoder(**changes: Any) -> Decoder:
    """Return a decoder of ``CONFIG`` with ``changes``, always with the same weights."""
    decoder = Decoder(replace(CONFIG, **changes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            draw_parameter(name, parameter, config=decoder.config, generator=generator)
    return decoder
