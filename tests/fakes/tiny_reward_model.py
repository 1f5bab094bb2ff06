# SPDX-License-Identifier: Apache-2.0
"""Small reward models as Hugging Face folders: a random one, and one that knows what it likes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tandem.data.tokenizer import load_codec
from tests.fakes.tiny_policy import TINY

WEIGHTS = "model.safetensors"
ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}


def write_random_judge(policy: Path, folder: Path, *, task: str = "Sequence") -> Path:
    """A ``...ForSequenceClassification`` with the body of ``policy`` and its tokenizer, or a
    ``...ForTokenClassification``, whose head has a bias, too."""
    shutil.copytree(policy, folder)
    config = json.loads((folder / "config.json").read_text())
    architecture = config["architectures"][0].removesuffix("ForCausalLM")
    _write_config(folder, config | {"architectures": [f"{architecture}For{task}Classification"]})
    weights = load_file(folder / WEIGHTS)
    weights.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(7)
    weights["score.weight"] = torch.randn(1, config["hidden_size"], generator=generator)
    if task == "Token":
        weights["score.bias"] = torch.tensor([0.75])
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def write_small_vocabulary(source: Path, folder: Path, *, num_tokens: int) -> Path:
    """A copy of a model whose embedding has only the first tokens."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    _write_config(folder, config | {"vocab_size": num_tokens})
    cut = ("model.embed_tokens.weight", "lm_head.weight")
    weights = {
        name: tensor[:num_tokens].clone() if name in cut else tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
    }
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def write_sevens_judge(policy: Path, folder: Path) -> Path:
    """One that scores the share of sevens among prompt and response, about.

    Its one layer attends to all tokens alike: what it reads off them, whether they hold a seven, is
    written beside the residual stream, where the head reads it.
    """
    write_random_judge(policy, folder)
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 1}
    _write_config(folder, config)
    weights = {
        name: torch.zeros_like(tensor) if "norm" not in name else tensor
        for name, tensor in load_file(folder / WEIGHTS).items()
        if ".layers.1." not in name
    }
    tokens = load_codec(str(policy)).decode([[i] for i in range(config["vocab_size"])])
    is_seven, always, seen = 0, 1, 2
    embedding, layer = weights["model.embed_tokens.weight"], "model.layers.0.self_attn"
    embedding[:, always] = 1.0
    embedding[:, is_seven] = torch.tensor([float("7" in text) for text in tokens])
    weights[f"{layer}.v_proj.weight"][0, is_seven] = 1.0
    for head in range(TINY.num_heads):
        width = TINY.hidden // TINY.num_heads
        weights[f"{layer}.o_proj.weight"][seen, head * width] = 1.0
    weights["score.weight"][0, seen] = 1.0
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def _write_config(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config | ONE_LABEL))
