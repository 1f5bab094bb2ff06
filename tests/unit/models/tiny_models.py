# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of every family, as transformers builds them, and packed batches."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Dots1Config,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.types import PackedBatch, Segments

VOCAB = 67
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

NATIVE = {
    "qwen2_tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2_untied": lambda: Qwen2Config(**SIZES),
    "qwen3_tied": lambda: Qwen3Config(**SIZES, head_dim=16, tie_word_embeddings=True),
    "qwen3_biases": lambda: Qwen3Config(**SIZES, head_dim=16, attention_bias=True),
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_biases_tied": lambda: LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
}

_SPLIT = {"num_experts_per_tok": 3, "moe_intermediate_size": 24}
_DEEPSEEK = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "head_dim": 16,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "sliding_window": None,
}
_GLM = {name: value for name, value in _DEEPSEEK.items() if name != "sliding_window"}
_ALL_HEADS = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
_ROUTED = {name: value for name, value in _GLM.items() if name != "head_dim"}
_LATENT = {
    "kv_lora_rank": 12,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "eos_token_id": None,  # transformers would not generate it before the last token
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.8,
    "original_max_position_embeddings": 32,
    "beta_fast": 32,
    "beta_slow": 1,
}
EXPERTS = {
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SIZES, **_SPLIT, num_experts=8, head_dim=16, norm_topk_prob=True
    ),
    "qwen3_moe_plain_weights": lambda: Qwen3MoeConfig(
        **SIZES, **_SPLIT, num_experts=8, head_dim=16, tie_word_embeddings=True
    ),
    "qwen3_moe_dense_layer": lambda: Qwen3MoeConfig(
        **SIZES, **_SPLIT, num_experts=8, head_dim=16, mlp_only_layers=[1]
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **SIZES, **_SPLIT, num_experts=8, shared_expert_intermediate_size=40
    ),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2),
    "dots1": lambda: Dots1Config(**SIZES, **_SPLIT, **_DEEPSEEK),
    "glm4_moe": lambda: Glm4MoeConfig(
        **SIZES, **_SPLIT, **_GLM, attention_bias=True, use_qk_norm=True, num_mtp_layers=0
    ),
    "glm4_moe_plain": lambda: Glm4MoeConfig(**SIZES, **_SPLIT, **_GLM, num_mtp_layers=0),
    # transformers gives the embedding of a padding token no gradient.
    "olmoe": lambda: OlmoeConfig(**SIZES, num_experts=8, num_experts_per_tok=3, pad_token_id=None),
    "dots1_groups": lambda: Dots1Config(**SIZES, **_SPLIT, **_DEEPSEEK, n_group=4, topk_group=2),
    "deepseek_v2": lambda: DeepseekV2Config(
        **_ALL_HEADS, **_SPLIT, **_ROUTED, **_LATENT, q_lora_rank=None
    ),
    "deepseek_v2_groups": lambda: DeepseekV2Config(
        **_ALL_HEADS,
        **_SPLIT,
        **_ROUTED,
        **_LATENT,
        q_lora_rank=20,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        attention_bias=True,
    ),
    # Values wider than keys, and pairs that are not interleaved.
    "deepseek_v3_wide_values": lambda: DeepseekV3Config(
        **_ALL_HEADS,
        **_SPLIT,
        **_ROUTED,
        **(_LATENT | {"v_head_dim": 24}),
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        rope_interleave=False,
        num_mtp_layers=0,
    ),
    "deepseek_v3": lambda: DeepseekV3Config(
        **_ALL_HEADS,
        **_SPLIT,
        **_ROUTED,
        **_LATENT,
        q_lora_rank=20,
        n_group=4,
        topk_group=2,
        rope_parameters=_YARN,
        num_mtp_layers=0,
    ),
}
"""Models with experts; ``write_xdg`` writes another one, which transformers does not know."""


def hf_model(hf_config: PretrainedConfig, seed: int = 0, *, std: float = 0.2) -> PreTrainedModel:
    """Return a model of random weights: norms near 1, all others normal(0, std).

    Experts are computed one by one, by the code that defines them, and not by a grouped product.
    """
    model = AutoModelForCausalLM.from_config(hf_config, dtype=torch.float32).eval()
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    corrections = [x for x in model.named_buffers() if "correction" in x[0]]
    with torch.no_grad():
        for name, parameter in (*model.named_parameters(), *corrections):
            parameter.normal_(1.0 if "norm" in name else 0.0, std, generator=generator)
    return model


def write_xdg(folder: Path, *, std: float = 0.2) -> PreTrainedModel:
    """Write red-moe's family into ``folder``."""
    theirs = write_hf(EXPERTS["dots1"](), folder, std=std)
    name_as_red_moe(folder)
    return theirs


def name_as_red_moe(folder: Path) -> None:
    """Turn a folder of dots1 into one of red-moe, which has other names for the same network."""
    file = folder / "model.safetensors"
    renamed = {
        name.replace("q_norm", "q_layernorm").replace("k_norm", "k_layernorm"): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(renamed, file, metadata={"format": "pt"})
    content = json.loads((folder / "config.json").read_text())
    content |= {"model_type": "XdgMoE", "scoring_func": "noaux_tc", "qk_layernorm": True}
    del content["n_group"], content["topk_group"], content["layer_types"]
    (folder / "config.json").write_text(json.dumps(content))


def write_hf(hf_config: PretrainedConfig, folder: Path, *, std: float = 0.2) -> PreTrainedModel:
    """``hf_model`` written into ``folder``."""
    model = hf_model(hf_config, std=std)
    model.save_pretrained(folder)
    return model


def open_fp32(folder: Path) -> LanguageModel:
    """``open_model`` in fp32 on the CPU."""
    return open_model(str(folder), dtype=torch.float32, device="cpu")


def pack_shared(prompts: list[list[int]], responses: list[list[list[int]]]) -> PackedBatch:
    """Pack prompts, each followed by its responses as segments that name it as prefix."""
    token_ids, positions, segments, sources, targets = [], [], [], [], []
    for prompt, group in zip(prompts, responses, strict=True):
        prompt_start = len(token_ids)
        token_ids += prompt
        positions += range(len(prompt))
        segments.append((prompt_start, len(prompt), 0, 0))
        for response in group:
            start = len(token_ids)
            token_ids += response
            positions += range(len(prompt), len(prompt) + len(response))
            segments.append((start, len(response), prompt_start, len(prompt)))
            sources += [prompt_start + len(prompt) - 1, *range(start, start + len(response) - 1)]
            targets += response
    return _batch(token_ids, positions, segments=segments, sources=sources, targets=targets)


def pack_separate(prompts: list[list[int]], responses: list[list[list[int]]]) -> PackedBatch:
    """Pack the same sequences, each as one segment with a prompt of its own."""
    token_ids, positions, segments, sources, targets = [], [], [], [], []
    for prompt, group in zip(prompts, responses, strict=True):
        for response in group:
            start, length = len(token_ids), len(prompt) + len(response)
            token_ids += prompt + response
            positions += range(length)
            segments.append((start, length, 0, 0))
            sources += range(start + len(prompt) - 1, start + length - 1)
            targets += response
    return _batch(token_ids, positions, segments=segments, sources=sources, targets=targets)


def _batch(
    token_ids: list[int],
    positions: list[int],
    *,
    segments: list[tuple[int, int, int, int]],
    sources: list[int],
    targets: list[int],
) -> PackedBatch:
    return PackedBatch(
        token_ids_T=torch.tensor(token_ids),
        position_ids_T=torch.tensor(positions),
        segments=Segments(*torch.tensor(segments).T),
        source_R=torch.tensor(sources),
        target_R=torch.tensor(targets),
        sequence_R=torch.zeros(len(targets), dtype=torch.int64),
        num_sequences=1,
    )


def sample_sequences(seed: int = 0) -> tuple[list[list[int]], list[list[list[int]]]]:
    """Return three prompts with 3, 1 and 2 responses, of lengths from 1 to 30."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int) -> list[int]:
        return torch.randint(VOCAB, (length,), generator=generator).tolist()

    prompts = [draw(5), draw(1), draw(17)]
    responses = [[draw(7), draw(1), draw(12)], [draw(30)], [draw(3), draw(2)]]
    return prompts, responses


def hf_logits(model: PreTrainedModel, packed: PackedBatch) -> Tensor:
    """Compute logits (T, V) by transformers, one segment with its prefix at a time."""
    logits = []
    segments = packed.segments
    for start, length, prefix_start, prefix_length in torch.stack(
        (segments.start_S, segments.length_S, segments.prefix_start_S, segments.prefix_length_S), 1
    ).tolist():
        prefix = packed.token_ids_T[prefix_start : prefix_start + prefix_length]
        ids = torch.cat((prefix, packed.token_ids_T[start : start + length]))
        logits.append(model(input_ids=ids[None], use_cache=False).logits[0, prefix_length:])
    return torch.cat(logits)
