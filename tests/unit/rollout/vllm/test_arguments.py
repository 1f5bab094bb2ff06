# SPDX-License-Identifier: Apache-2.0
"""V13: what each key of ``actor_rollout_ref.rollout`` becomes as an argument of vLLM."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec
from tandem.rollout.vllm.arguments import engine_arguments
from tests.fakes.tiny_qwen2 import write_random_qwen2


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=True)
    hostile = {"temperature": 0.1, "top_k": 1, "eos_token_id": 5}
    (folder / "generation_config.json").write_text(json.dumps(hostile))
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    return EngineSpec(model, folder, RolloutConfig(), (0,), CPU, max_length=48)


def arguments(spec: EngineSpec, **keys: Any) -> dict[str, Any]:
    return engine_arguments(replace(spec, config=RolloutConfig.model_validate(keys)))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "bfloat16", {"dtype": "bfloat16"}),
        ("dtype", "auto", {"dtype": "float32"}),
        ("seed", 7, {"seed": 7}),
        ("load_format", "dummy_dtensor", {"load_format": "dummy"}),
        ("load_format", "safetensors", {"load_format": "safetensors"}),
        ("max_num_seqs", 9, {"max_num_seqs": 10}),
        ("max_num_batched_tokens", 64, {"max_num_batched_tokens": 1025}),
        ("max_num_batched_tokens", 2048, {"max_num_batched_tokens": 2048}),
        ("expert_parallel_size", 1, {"enable_expert_parallel": False}),
        ("expert_parallel_size", 2, {"enable_expert_parallel": True}),
        ("quantization", "fp8", {"quantization": "fp8_per_channel"}),
        ("enforce_eager", True, {"enforce_eager": True}),
        ("enable_chunked_prefill", False, {"enable_chunked_prefill": False}),
        ("enable_prefix_caching", False, {"enable_prefix_caching": False}),
        ("disable_log_stats", False, {"disable_log_stats": False}),
        ("cudagraph_capture_sizes", [1, 8], {"cudagraph_capture_sizes": [1, 8]}),
        ("engine_kwargs", {"vllm": {"block_size": 32}}, {"block_size": 32}),
    ],
)
def test_v13_a_key_reaches_vllm(
    spec: EngineSpec, key: str, value: object, expected: dict[str, object]
) -> None:
    found = arguments(spec, **{key: value})
    assert found | expected == found


def test_v13_what_no_key_decides(spec: EngineSpec) -> None:
    found = arguments(spec)
    assert found["generation_config"] == "vllm", "not the folder's own defaults of sampling"
    assert found["skip_tokenizer_init"]
    assert found["max_model_len"] == 48
    assert engine_arguments(replace(spec, max_length=None))["max_model_len"] == -1
    assert engine_arguments(replace(spec, max_length=3))["max_model_len"] == 16, "the canary's"
    whole = arguments(spec, enable_chunked_prefill=False, max_num_seqs=2, max_num_batched_tokens=4)
    assert whole["max_num_batched_tokens"] == 48


def test_v13_on_an_accelerator(spec: EngineSpec) -> None:
    platform = replace(CPU, device_type="cuda", total_memory_bytes=lambda: 10_000_000)
    spec = replace(spec, platform=platform)
    weights = sum(weight.nbytes for weight in spec.model.module.parameters())
    found = arguments(spec, gpu_memory_utilization=0.25, free_cache_engine=True, max_num_seqs=7)
    counts = (7 + 1) * spec.model.lm_head_weight.shape[0] * 4
    assert found["kv_cache_memory_bytes"] == 2_500_000 - weights - counts
    assert found["gpu_memory_utilization"] == 0.25, "vLLM's own 0.92 may not be free"
    assert "gpu_memory_utilization" not in engine_arguments(replace(spec, platform=CPU))
    assert arguments(spec, quantization="fp8")["quantization"] == "fp8"
    assert "quantization" not in found
    assert found["enable_sleep_mode"] and not found["enforce_eager"]
    assert found["async_scheduling"], "steps are scheduled while the device computes"
    assert not arguments(spec)["enable_sleep_mode"]


def test_v13_the_cache_on_a_cpu_is_twice_what_the_rows_need(spec: EngineSpec) -> None:
    """For three samples and a canary of up to 48 tokens, in fp32, and for vLLM's own block."""
    assert spec.model.decoder is not None
    config = spec.model.decoder.config
    token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    found = arguments(spec, max_num_seqs=3)["kv_cache_memory_bytes"]
    assert found == 2 * (4 * (48 + 128) + 128) * token
    larger = arguments(spec, max_num_seqs=3, engine_kwargs={"vllm": {"block_size": 512}})
    assert larger["kv_cache_memory_bytes"] == 2 * (4 * (48 + 512) + 512) * token
    unknown = engine_arguments(replace(spec, max_length=None))
    assert unknown["kv_cache_memory_bytes"] == CPU.total_memory_bytes() // 16
    small = replace(spec, platform=replace(CPU, total_memory_bytes=lambda: 1600))
    assert engine_arguments(small)["kv_cache_memory_bytes"] == 100
