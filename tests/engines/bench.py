# SPDX-License-Identifier: Apache-2.0
"""Tiny models of several families, and rollout engines over them that receive weights.

The random weights are large, so that stale ones are visible. The head dimension is 32, for which
vLLM's CPU attention has a kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tandem.api import RolloutEngine
from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.models.operators import operators_for
from tandem.platforms.record import CPU, Platform
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import FedRollout, WeightFeed
from tandem.testing.contracts.rollout import EngineBench
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.unit.models.tiny_models import name_as_red_moe

VOCAB = 96
EOS = (0, 1)
MAX_ERROR = 1e-4
"""The bound on the difference of log-probs in fp32. The largest that was measured is 3e-5."""
RULES = (
    SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=16),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=16),
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=16, ignore_eos=True),
)
_SIZES: Mapping[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS: Mapping[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
}
_DEEPSEEK: Mapping[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
}
_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
FAMILIES: Mapping[str, Callable[[], transformers.PretrainedConfig]] = {
    "qwen2 tied": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "qwen2 untied": lambda: transformers.Qwen2Config(**_SIZES, tie_word_embeddings=False),
    "qwen3": lambda: transformers.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True),
    "llama": lambda: transformers.LlamaConfig(**_SIZES, rope_parameters=_ROPE),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **_SIZES, **_EXPERTS, head_dim=32, num_experts=4, tie_word_embeddings=False
    ),
    "gemma": lambda: transformers.GemmaConfig(**_SIZES, head_dim=32),
    "phi3": lambda: transformers.Phi3Config(**_SIZES),
    "dots1": lambda: transformers.Dots1Config(
        **_SIZES, **_EXPERTS, **_DEEPSEEK, head_dim=32, sliding_window=None
    ),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_SIZES, **_EXPERTS, **_DEEPSEEK, head_dim=32, num_nextn_predict_layers=0
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **_SIZES,
        **_EXPERTS,
        num_experts=4,
        shared_expert_intermediate_size=64,
        tie_word_embeddings=False,
    ),
    "mixtral": lambda: transformers.MixtralConfig(
        **_SIZES, num_local_experts=4, num_experts_per_tok=2
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_SIZES, num_experts=4, num_experts_per_tok=2),
}
"""Gemma and Phi-3 are computed by transformers in the trainer, all others by our decoder."""


def write_model(folder: Path, family: str, **settings: Any) -> Path:
    """Write a random model: norms near 1, all else normal(0, 0.2), with the corrections of routers.

    Args:
        settings: entries of config.json that differ.
    """
    is_red_moe = family == "red-moe"
    config = FAMILIES["dots1" if is_red_moe else family]()
    config.update(settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        corrections = [one for one in model.named_buffers() if "correction" in one[0]]
        for name, weight in (*model.named_parameters(), *corrections):
            weight.normal_(1.0 if "norm" in name else 0.0, 0.2, generator=generator)
    model.save_pretrained(folder)
    if is_red_moe:
        name_as_red_moe(folder)
    return folder


def open_spec(
    folder: Path, *, platform: Platform = CPU, dtype: torch.dtype = torch.float32, **keys: Any
) -> EngineSpec:
    """Return the spec of an engine over the model in ``folder``.

    Args:
        platform: where model and engine are.
        dtype: the precision of the model.
        keys: keys of ``actor_rollout_ref.rollout`` besides those of all tests.
    """
    operators = operators_for(platform)
    device = platform.device_type
    model = open_model(str(folder), dtype=dtype, device=device, operators=operators)
    model.module.requires_grad_(False)
    few = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "seed": 3}
    config = RolloutConfig.model_validate(few | keys)
    return EngineSpec(model, folder, config, EOS, platform, _SIZES["max_position_embeddings"])


@contextmanager
def scheduling_ahead() -> Iterator[None]:
    """Let vLLM schedule a step while the one before is computed. It does so on devices only."""
    from vllm.platforms.cpu import CpuPlatform

    update = CpuPlatform.check_and_update_config
    configs: list[Any] = []

    def update_and_schedule_ahead(vllm_config: Any) -> None:
        update(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True
        configs.append(vllm_config)

    with pytest.MonkeyPatch.context() as patch:
        replaced = staticmethod(update_and_schedule_ahead)
        patch.setattr(CpuPlatform, "check_and_update_config", replaced)
        yield
    assert configs, "vLLM started no engine"
    for config in configs:
        assert config.scheduler_config.async_scheduling and config.max_concurrent_batches > 1


@contextmanager
def running(
    build: Callable[[EngineSpec], RolloutEngine], spec: EngineSpec
) -> Iterator[EngineBench]:
    """Run an engine with the weights of the spec's model as version 0, and close it."""
    gc.freeze()  # vLLM collects often, and need not look at what is there from other tests
    engine = build(spec)
    try:
        sink = engine.sink()
        rollout = engine if sink is None else FedRollout(engine, WeightFeed(spec.model, sink))
        rollout.set_weights_version(0)
        yield EngineBench(engine, rollout, spec.model)
    finally:
        with pytest.MonkeyPatch.context() as patch:
            if spec.platform.device_type == "cpu":  # on a device, what is left must be freed
                patch.setattr(gc, "unfreeze", lambda: None)
            engine.close()


def requests(
    *, first_id: int = 0, num_prompts: int = 4, n: int = 2, length: int = 40
) -> list[GenerationRequest]:
    """Return requests for ``n`` samples of each prompt and rule. Prompts differ in length."""
    found: list[GenerationRequest] = []
    for rule in RULES:
        for index in range(num_prompts):
            prompt = tuple(2 + (7 * index + j) % (VOCAB - 2) for j in range(length + 5 * index))
            start = first_id + n * len(found)
            found.append(GenerationRequest(tuple(range(start, start + n)), prompt, rule))
    return found


def largest_error(
    bench: EngineBench, asked: Sequence[GenerationRequest], found: Mapping[int, Completion]
) -> float:
    """Return the largest difference from the trainer's log-probs, over all tokens of samples."""
    errors = [
        (torch.tensor(found[i].log_probs) - bench.log_probs(request, found[i])).abs().max()
        for request in asked
        for i in request.sample_ids
    ]
    return float(torch.stack(errors).max())


def transformers_log_probs(
    model: LanguageModel, folder: Path, request: GenerationRequest, found: Completion
) -> Tensor:
    """Return what transformers' forward pass says of a response, (R,), at its temperature.

    Args:
        folder: a folder that is made, into which the weights are saved.
    """
    folder.mkdir(exist_ok=True)
    model.save(folder)
    module = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor(found.token_ids)
    ids = torch.cat((torch.tensor(request.prompt_ids), tokens))
    with torch.no_grad():
        logits_RV = module(ids[None]).logits[0, len(request.prompt_ids) - 1 : -1].float()
    scaled_RV = torch.log_softmax(logits_RV / (request.sampling.temperature or 1.0), -1)
    return scaled_RV.gather(1, tokens[:, None])[:, 0]


def tokens_of(found: Mapping[int, Completion]) -> dict[int, list[int]]:
    """Return the tokens of each sample."""
    return {sample_id: list(one.token_ids) for sample_id, one in found.items()}
