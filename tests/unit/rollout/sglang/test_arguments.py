# SPDX-License-Identifier: Apache-2.0
"""V13: what each key of ``actor_rollout_ref.rollout`` becomes as an argument of SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec
from tandem.rollout.sglang.arguments import engine_arguments
from tests.fakes.tiny_qwen2 import write_random_qwen2


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=True)
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    return EngineSpec(model, folder, RolloutConfig(), (0,), CPU, max_length=48)


def arguments(spec: EngineSpec, **keys: Any) -> dict[str, Any]:
    config = RolloutConfig.model_validate(keys)
    return engine_arguments(replace(spec, config=config), max_positions=128)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("dtype", "bfloat16", {"dtype": "bfloat16"}),
        ("dtype", "auto", {"dtype": "float32"}),
        ("seed", 7, {"random_seed": 7}),
        ("load_format", "dummy_dtensor", {"load_format": "dummy"}),
        ("load_format", "safetensors", {"load_format": "safetensors"}),
        ("max_num_seqs", 9, {"max_running_requests": 10, "max_total_tokens": 10 * 56}),
        ("max_num_batched_tokens", 64, {"chunked_prefill_size": 64, "max_prefill_tokens": 64}),
        ("enable_chunked_prefill", False, {"chunked_prefill_size": -1}),
        ("enable_prefix_caching", False, {"disable_radix_cache": True}),
        ("gpu_memory_utilization", 0.3, {"mem_fraction_static": 0.3}),
        ("cudagraph_capture_sizes", [1, 8], {"cuda_graph_bs_decode": [1, 8]}),
        ("engine_kwargs", {"sglang": {"page_size": 4, "python": "p"}}, {"page_size": 4}),
    ],
)
def test_v13_a_key_reaches_sglang(
    spec: EngineSpec, key: str, value: object, expected: dict[str, object]
) -> None:
    found = arguments(spec, **{key: value})
    assert found | expected == found
    assert "python" not in found


def test_v13_what_no_key_decides(spec: EngineSpec) -> None:
    found = arguments(spec)
    assert found["sampling_defaults"] == "openai", "not the folder's own defaults of sampling"
    assert found["skip_tokenizer_init"] and found["disable_overlap_schedule"]
    assert found["attention_backend"] == "torch_native" and found["disable_cuda_graph"]
    assert found["context_length"] == 48 + 8
    longest = engine_arguments(replace(spec, max_length=None), max_positions=128)
    assert longest["context_length"] == 128 + 8
    shortest = engine_arguments(replace(spec, max_length=3), max_positions=128)
    assert shortest["context_length"] == 16 + 8, "the canary's"


def test_v13_on_an_accelerator(spec: EngineSpec) -> None:
    on_device = replace(spec, platform=replace(CPU, device_type="cuda"))
    found = arguments(on_device)
    assert not found["disable_cuda_graph"]
    assert "attention_backend" not in found and "max_total_tokens" not in found
    assert arguments(on_device, enforce_eager=True)["disable_cuda_graph"]


def test_the_devices_of_an_engine(spec: EngineSpec) -> None:
    keys = {"name": "sglang", "tensor_model_parallel_size": 2}
    assert (arguments(spec)["tp_size"], arguments(spec, **keys)["tp_size"]) == (1, 2)
