# SPDX-License-Identifier: Apache-2.0
"""A Qwen2 model with random weights, small enough to learn arithmetic on a CPU within a minute.

It is written as an ordinary Hugging Face folder (``config.json``, ``generation_config.json``,
``model.safetensors``) without building the model. ``write_expert_model`` writes a Qwen3-MoE with as
many parameters for each token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tandem.models.folder import open_model
from tandem.models.weights import save_hf_folder

INIT_STD = 0.02
VOCAB_MULTIPLE = 16
NUM_EXPERTS, NUM_CHOSEN = 8, 2
"""The numbers of experts of a layer and of a token, in the model with experts."""


@dataclass(frozen=True)
class ModelSize:
    """The sizes of a Qwen2 model with tied embeddings; the defaults make 155,200 parameters."""

    hidden: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    intermediate: int = 256
    max_positions: int = 256


QUICKSTART_SIZE = ModelSize()


def padded_vocab(num_tokens: int) -> int:
    """Return the number of rows of the embedding: the next multiple of 16."""
    return -(-num_tokens // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def random_weights(size: ModelSize, vocab: int, *, seed: int) -> dict[str, Tensor]:
    """Return fp32 tensors by their Hugging Face names.

    Matrices are drawn from normal(0, 0.02); biases are 0 and norms 1.
    """
    generator = torch.Generator().manual_seed(seed)
    head = size.hidden // size.num_heads

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * INIT_STD

    weights = {"model.embed_tokens.weight": matrix(vocab, size.hidden)}
    for layer in range(size.num_layers):
        prefix = f"model.layers.{layer}"
        for name, heads in zip("qkv", (size.num_heads, *[size.num_kv_heads] * 2), strict=True):
            weights[f"{prefix}.self_attn.{name}_proj.weight"] = matrix(heads * head, size.hidden)
            weights[f"{prefix}.self_attn.{name}_proj.bias"] = torch.zeros(heads * head)
        weights[f"{prefix}.self_attn.o_proj.weight"] = matrix(size.hidden, size.num_heads * head)
        weights[f"{prefix}.mlp.gate_proj.weight"] = matrix(size.intermediate, size.hidden)
        weights[f"{prefix}.mlp.up_proj.weight"] = matrix(size.intermediate, size.hidden)
        weights[f"{prefix}.mlp.down_proj.weight"] = matrix(size.hidden, size.intermediate)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}.{norm}.weight"] = torch.ones(size.hidden)
    weights["model.norm.weight"] = torch.ones(size.hidden)
    return weights


def qwen2_config(size: ModelSize, vocab: int, *, eos_id: int, pad_id: int) -> dict[str, object]:
    """Return the content of ``config.json``."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.num_layers,
        "num_attention_heads": size.num_heads,
        "num_key_value_heads": size.num_kv_heads,
        "max_position_embeddings": size.max_positions,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "initializer_range": INIT_STD,
        "eos_token_id": eos_id,
        "pad_token_id": pad_id,
        "torch_dtype": "float32",
    }


def write_model(
    folder: Path,
    *,
    num_tokens: int,
    eos_id: int,
    pad_id: int,
    seed: int,
    size: ModelSize = QUICKSTART_SIZE,
) -> int:
    """Write random weights and configs into an existing folder; return the parameter count."""
    vocab = padded_vocab(num_tokens)
    weights = random_weights(size, vocab, seed=seed)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_configs(qwen2_config(size, vocab, eos_id=eos_id, pad_id=pad_id), folder)
    return sum(tensor.numel() for tensor in weights.values())


def write_expert_model(
    folder: Path,
    *,
    num_tokens: int,
    eos_id: int,
    pad_id: int,
    seed: int,
    size: ModelSize = QUICKSTART_SIZE,
) -> int:
    """Write a random Qwen3-MoE into an existing folder; return the parameter count.

    The experts of a token have together the width of ``size``.
    """
    dense = qwen2_config(size, padded_vocab(num_tokens), eos_id=eos_id, pad_id=pad_id)
    experts = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": size.hidden // size.num_heads,
        "moe_intermediate_size": size.intermediate // NUM_CHOSEN,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
        "norm_topk_prob": True,
    }
    _write_configs({**dense, **experts}, folder)
    model = open_model(str(folder), dtype=torch.float32, device="cpu", random_seed=seed)
    assert model.decoder is not None, "our decoder computes Qwen3-MoE"
    save_hf_folder(model.decoder, folder)
    return sum(parameter.numel() for parameter in model.decoder.parameters())


def _write_configs(config: dict[str, object], folder: Path) -> None:
    generation = {name: config[name] for name in ("eos_token_id", "pad_token_id")}
    for name, content in (("config", config), ("generation_config", generation)):
        text = json.dumps(content, indent=2) + "\n"
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
