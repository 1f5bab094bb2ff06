# SPDX-License-Identifier: Apache-2.0
"""Tiny random models that see, as transformers builds them, and random pictures."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tandem.pictures import Picture

IMAGE, VIDEO, START, END = 5, 6, 7, 8
VOCAB = 120
PATCH = 4
SIDE = 2 * PATCH
"""The side of an image token in pixels."""
FAMILIES = ("qwen2_5_vl", "qwen3_vl")
TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": PATCH,
}


def hf_config(family: str, *, tied: bool = False, scaling: Mapping[str, Any] | None = None) -> Any:
    """Return transformers' config of a tiny model, with keys of a ``scaling`` of positions."""
    if family == "qwen2_5_vl":
        rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6}
        vision = {**_VISION, "fullatt_block_indexes": [1], "window_size": 16}
        text = dict(_TEXT)
        kind = transformers.Qwen2_5_VLConfig
    else:
        rope = {
            "rope_type": "default",
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
            "rope_theta": 5e6,
        }
        vision = {**_VISION, "deepstack_visual_indexes": [0, 1], "num_position_embeddings": 36}
        text = {**_TEXT, "head_dim": 16}
        kind = transformers.Qwen3VLConfig
    text = {**text, "tie_word_embeddings": tied, "rope_parameters": {**rope, **(scaling or {})}}
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=tied, **TOKENS)


def write_seeing(
    family: str, folder: Path, *, tied: bool = False, scaling: Mapping[str, Any] | None = None
) -> Any:
    """Write a model of random weights into ``folder``, and return it in transformers' form."""
    torch.manual_seed(0)
    kinds = {
        "qwen2_5_vl": transformers.Qwen2_5_VLForConditionalGeneration,
        "qwen3_vl": transformers.Qwen3VLForConditionalGeneration,
    }
    model = kinds[family](hf_config(family, tied=tied, scaling=scaling)).to(torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return model


def draw_picture(rng: random.Random, first_id: int, *, rows: int, columns: int) -> Picture:
    """Return a picture of random colours."""
    return Picture(first_id, rows, columns, SIDE, rng.randbytes(3 * rows * columns * SIDE**2))


def draw_prompt(
    rng: random.Random, sizes: list[tuple[int, int]], *, first_id: int
) -> tuple[list[int], tuple[Picture, ...]]:
    """Return a prompt with pictures of ``sizes`` between words, and the pictures."""
    ids, pictures = [rng.randrange(20, VOCAB) for _ in range(rng.randint(1, 4))], []
    for rows, columns in sizes:
        picture = draw_picture(rng, first_id, rows=rows, columns=columns)
        ids += [rng.randrange(20, VOCAB), START, *picture.token_ids, END]
        pictures.append(picture)
        first_id += picture.num_tokens
    return ids + [rng.randrange(20, VOCAB) for _ in range(rng.randint(2, 5))], tuple(pictures)


def theirs(
    model: Any, prompt: list[int], pictures: tuple[Picture, ...], *, patches: Tensor | None
) -> dict[str, Any]:
    """Return the arguments that transformers' model takes for a prompt."""
    ids = torch.tensor([[IMAGE if token >= VOCAB else token for token in prompt]])
    kinds = (ids == IMAGE).long()
    grids = torch.tensor([(1, 2 * p.rows, 2 * p.columns) for p in pictures]) if pictures else None
    position, delta = model.model.get_rope_index(ids, kinds, image_grid_thw=grids)
    extra = {"pixel_values": patches, "image_grid_thw": grids} if pictures else {}
    return {"input_ids": ids, "position_ids": position, "delta": int(delta), **extra}
