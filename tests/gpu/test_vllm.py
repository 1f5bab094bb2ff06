# SPDX-License-Identifier: Apache-2.0
"""vLLM on a GPU, in bf16 with captured steps: V19, the weights after many updates, and V20, the
memory that it gives back while the device trains. V26: weights that vLLM quantizes to fp8.

The random weights are large, so that log-probs of stale weights differ by far more than rounding.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tandem.platforms.record import CUDA
from tandem.rollout.feed import checkpoint_views
from tandem.testing.contracts.rollout import EngineBench
from tandem.types import SamplingParams
from tests.gpu.machine import Machine

pytest.importorskip("vllm", reason="needs vllm")

from tandem.rollout.vllm.engine import build
from tests.engines.bench import open_spec, running, write_model

NUM_VERSIONS = 20
MAX_MEAN_ERROR = 0.05
"""The bound on the mean difference of log-probs. Three layers round their results to bf16, whose
relative error is 2^-9, at logits of a size of about 5: 0.02 is expected, and 1 for stale weights.
"""
MAX_MEAN_QUANTIZED_ERROR = 1.0
"""The bound for products in fp8, of a model with one head of 64 numbers.

Products of rounded matrices and inputs, computed on a CPU under 20 versions, change the log-probs
of a version's canary by 0.1 to 0.9, 0.4 on average. Stale weights change them by 1.0 to 2.8, 1.9 on
average. With 256 numbers a token, rounding alone changes them by 1.0 to 2.8.
"""
PLAIN = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=48, ignore_eos=True)
UTILIZATION = 0.05
"""The share of the device for weights and cache."""


def write_random(machine: Machine, folder: Path, *, heads: int) -> Path:
    """Write a random model with heads of 64 numbers, or skip the test."""
    if machine.trial:
        pytest.skip("vLLM's own kernels are not interpreted")
    return write_model(
        folder,
        "qwen2 tied",
        hidden_size=64 * heads,
        num_attention_heads=heads,
        num_key_value_heads=1,
    )


@pytest.fixture
def folder(machine: Machine, tmp_path: Path) -> Path:
    """The folder of a random model with four heads."""
    return write_random(machine, tmp_path, heads=4)


def mean_error(bench: EngineBench) -> float:
    """Return the mean difference from the trainer's log-probs over all tokens of new samples."""
    asked = [bench.request(index, n=4, sampling=PLAIN) for index in range(3)]
    found = bench.generate(asked)
    errors = [
        (torch.tensor(found[i].log_probs) - bench.log_probs(request, found[i])).abs()
        for request in asked
        for i in request.sample_ids
    ]
    return float(torch.cat(errors).mean())


def test_v19_each_of_twenty_versions_is_generated_with(folder: Path) -> None:
    spec = open_spec(
        folder, platform=CUDA, dtype=torch.bfloat16, gpu_memory_utilization=UTILIZATION
    )
    with running(build, spec) as bench:
        assert mean_error(bench) <= MAX_MEAN_ERROR
        for seed in range(NUM_VERSIONS):
            bench.use_new_weights(seed)
            assert mean_error(bench) <= MAX_MEAN_ERROR


def test_v26_each_version_in_fp8_is_generated_with(machine: Machine, tmp_path: Path) -> None:
    folder = write_random(machine, tmp_path, heads=1)
    keys = {"gpu_memory_utilization": UTILIZATION, "name": "vllm", "quantization": "fp8"}
    with running(build, open_spec(folder, platform=CUDA, dtype=torch.bfloat16, **keys)) as bench:
        for seed in range(NUM_VERSIONS):
            bench.use_new_weights(seed)
            assert mean_error(bench) <= MAX_MEAN_QUANTIZED_ERROR


def test_v20_sleep_frees_weights_and_cache_and_the_next_version_is_right(folder: Path) -> None:
    spec = open_spec(
        folder,
        platform=CUDA,
        dtype=torch.bfloat16,
        gpu_memory_utilization=UTILIZATION,
        free_cache_engine=True,
    )
    held = UTILIZATION * CUDA.total_memory_bytes()
    assert held > 10 * sum(view.nbytes for _, view in checkpoint_views(spec.model))
    with running(build, spec) as bench:
        assert mean_error(bench) <= MAX_MEAN_ERROR
        for seed in range(3):
            awake = torch.cuda.mem_get_info()[0]
            assert bench.engine.sleep()
            freed = torch.cuda.mem_get_info()[0] - awake
            assert freed >= 0.95 * held
            bench.engine.wake()
            bench.use_new_weights(seed)
            assert mean_error(bench) <= MAX_MEAN_ERROR
