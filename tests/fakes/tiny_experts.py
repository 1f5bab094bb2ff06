# SPDX-License-Identifier: Apache-2.0
"""Random models with experts and the tokenizer of ``tiny_policy``, as Hugging Face folders."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Dots1Config,
    PretrainedConfig,
    Qwen3MoeConfig,
)

from tandem.quickstart.tokenizer import END_ID, PAD_ID
from tests.fakes.tiny_policy import write_tiny_tokenizer

_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "eos_token_id": END_ID,
    "bos_token_id": END_ID,
    "pad_token_id": PAD_ID,
}


def write_tiny_qwen3_moe(
    folder: Path, *, num_experts: int = 8, num_heads: int = 2, num_kv_heads: int = 1
) -> Path:
    """Write a Qwen3-MoE whose layers all have experts; return the folder."""
    num_tokens = write_tiny_tokenizer(folder).get_vocab_size()
    sizes = _SIZES | {"tie_word_embeddings": True, "num_experts": num_experts}
    sizes |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    _write(Qwen3MoeConfig(vocab_size=num_tokens, **sizes), folder)
    return folder


def write_tiny_moonlight(folder: Path, *, num_experts: int = 8) -> Path:
    """Write a model with latent attention and a dense first layer; return the folder."""
    num_tokens = write_tiny_tokenizer(folder).get_vocab_size()
    sizes = _SIZES | {"n_routed_experts": num_experts, "first_k_dense_replace": 1, "n_group": 2}
    sizes |= {"topk_group": 1, "num_mtp_layers": 0, "q_lora_rank": None, "kv_lora_rank": 16}
    sizes |= {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    del sizes["head_dim"], sizes["num_key_value_heads"]
    _write(DeepseekV3Config(vocab_size=num_tokens, **sizes), folder)
    return folder


def write_tiny_red_moe(folder: Path, *, num_experts: int = 8) -> Path:
    """Write a model of red-moe's family with a dense first layer; return the folder."""
    num_tokens = write_tiny_tokenizer(folder).get_vocab_size()
    experts = {"n_routed_experts": num_experts, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config = Dots1Config(vocab_size=num_tokens, sliding_window=None, **_SIZES, **experts)
    _write(config, folder)
    file = folder / "model.safetensors"
    renamed = {
        name.replace("q_norm", "q_layernorm").replace("k_norm", "k_layernorm"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": "XdgMoE", "scoring_func": "noaux_tc", "qk_layernorm": True}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


def _write(config: PretrainedConfig, folder: Path) -> None:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
