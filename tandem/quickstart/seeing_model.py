# SPDX-License-Identifier: Apache-2.0
"""A random model that sees, of Qwen2.5-VL's or Qwen3-VL's kind, small enough to learn on a CPU.

It is written as an ordinary Hugging Face folder. It has about 0.2 M parameters: a tower of two
blocks and a decoder of two layers. A token of a picture is 8 x 8 pixels.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tandem.models.decoder import Decoder
from tandem.models.families import decoder_config
from tandem.models.weights import save_hf_folder
from tandem.quickstart.model import padded_vocab

FAMILIES = ("qwen2_5_vl", "qwen3_vl")
VISION_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
_KEYS = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
_CLASSES = {
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
}
_TEXT = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "initializer_range": 0.02,
}
_VISION = {
    "depth": 2,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "in_channels": 3,
}
_PIXELS = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "min_pixels": 64, "max_pixels": 65536}


def seeing_config(family: str, *, vocab: int, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        ids: the ids of ``VISION_TOKENS``, and of end and padding as ``eos`` and ``pad``.
    """
    if family == "qwen2_5_vl":
        rope: dict[str, Any] = {"rope_theta": 1e4, "mrope_section": [4, 6, 6]}
        text: dict[str, Any] = {**_TEXT}
        vision: dict[str, Any] = {**_VISION, "fullatt_block_indexes": [1], "window_size": 16}
    else:
        rope = {"rope_theta": 1e4, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
        text = {**_TEXT, "head_dim": 32}
        vision = {**_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 36}
    ends = {"eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    rope = {"rope_type": "default", **rope}
    return {
        "architectures": [_CLASSES[family]],
        "model_type": family,
        "text_config": {**text, **ends, "vocab_size": vocab, "rope_parameters": rope},
        "vision_config": vision,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **{key: ids[token] for key, token in zip(_KEYS, VISION_TOKENS, strict=True)},
        **ends,
    }


def write_seeing_model(
    folder: Path, family: str, *, num_tokens: int, ids: Mapping[str, int], seed: int
) -> int:
    """Write random weights and configs into an existing folder; return the parameter count."""
    config = seeing_config(family, vocab=padded_vocab(num_tokens), ids=ids)
    sizes = decoder_config(config)
    assert sizes is not None, "tandem's decoder computes these families"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = Decoder(sizes)
        _draw(decoder)
    save_hf_folder(decoder, folder)
    generation = {"eos_token_id": ids["eos"], "pad_token_id": ids["pad"]}
    files = {
        "config": config,
        "generation_config": generation,
        "preprocessor_config": _PIXELS,
    }
    for name, content in files.items():
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return sum(parameter.numel() for parameter in decoder.parameters())


@torch.no_grad()
def _draw(decoder: Decoder) -> None:
    for module in decoder.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(0.0, 0.06)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(0.0, 0.02)
    tower = decoder.tower
    if tower is not None and tower.config.position_side:
        # Embeddings of patches have a standard deviation of 0.4. Beside them, a table of positions
        # of 0.02 is lost in the first norm, and some models never learn where a shape is.
        tower.pos_embed.weight.normal_(0.0, 0.3)
