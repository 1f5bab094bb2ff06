# SPDX-License-Identifier: Apache-2.0
"""verl's formulas for speed, with its own numbers for Qwen2.5-0.5B."""

from dataclasses import replace

import pytest

from tandem.config.derived.sizes import ModelSizes
from tandem.metrics.throughput import (
    ComputeFacts,
    StepTime,
    actor_utilisation_metrics,
    matmul_parameters,
    memory_metrics,
    peak_flops,
    throughput_metrics,
    timing_metrics,
    training_flops,
)

QWEN_05B = ModelSizes(
    num_layers=24,
    hidden=896,
    inner=4864,
    num_heads=14,
    num_kv_heads=2,
    head_dim=64,
    vocabulary=151936,
    tied=True,
)


def test_qwen_flops():
    assert matmul_parameters(QWEN_05B) == 630_095_872
    assert training_flops(QWEN_05B, [300] * 64) == pytest.approx(73.330e12, rel=1e-4)


def test_frozen_weights_have_no_gradient_to_compute():
    adapted = replace(QWEN_05B, adapters=1000)
    squares = 6 * 24 * 14 * 64 * 300**2
    assert training_flops(adapted, [300]) == 4 * 630_095_872 * 300 + 6 * 1000 * 300 + squares


@pytest.mark.parametrize(("num_epochs", "seconds"), [(1, 1.0), (3, 3.0)])
def test_utilisation_on_one_h200(num_epochs, seconds):
    facts = ComputeFacts(
        sizes=QWEN_05B, device_name="NVIDIA H200", num_devices=1, num_training_devices=1
    )

    metrics = actor_utilisation_metrics(
        [300] * 64, seconds=seconds, num_epochs=num_epochs, facts=facts
    )

    assert metrics["perf/mfu/actor"] == pytest.approx(0.07415, abs=5e-6)


def test_utilisation_is_zero_where_it_cannot_be_known():
    unknown_device = ComputeFacts(
        sizes=QWEN_05B, device_name="cpu", num_devices=1, num_training_devices=1
    )
    unknown_model = ComputeFacts(
        sizes=None, device_name="NVIDIA H200", num_devices=1, num_training_devices=1
    )

    for facts in (unknown_device, unknown_model):
        metrics = actor_utilisation_metrics([300], seconds=1.0, num_epochs=1, facts=facts)
        assert metrics == {"perf/mfu/actor": 0.0}


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H20", 148e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA B200", 2250e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362.05e12),
        ("Ascend910B3", 354e12),
        ("AMD Instinct MI300X", 1307e12),
        ("cpu", 0.0),
    ],
)
def test_peak_flops(device, peak):
    assert peak_flops(device) == peak


def test_throughput_counts_devices_and_wall_time():
    metrics = throughput_metrics(1200, time=StepTime(step_s=2.0, wall_s=3.0), num_devices=4)

    assert metrics == {
        "perf/total_num_tokens": 1200.0,
        "perf/time_per_step": 2.0,
        "perf/throughput": 150.0,
        "perf/wall_throughput": 100.0,
    }


def test_timing_per_token_counts_responses_for_generation_only():
    seconds = {"gen": 2.0, "update_actor": 4.0, "step": 7.0}

    metrics = timing_metrics(seconds, num_prompt_tokens=3000, num_response_tokens=1000)

    assert metrics == {
        "timing_s/gen": 2.0,
        "timing_s/update_actor": 4.0,
        "timing_s/step": 7.0,
        "timing_per_token_ms/gen": 2.0,
        "timing_per_token_ms/update_actor": 1.0,
    }


def test_timing_without_tokens():
    seconds = {"gen": 0.0, "testing": 1.5}

    metrics = timing_metrics(seconds, num_prompt_tokens=0, num_response_tokens=0)

    assert metrics == {"timing_s/gen": 0.0, "timing_s/testing": 1.5}


def test_memory_is_in_gib():
    metrics = memory_metrics(3 * 2**30, reserved_bytes=2**31)

    assert metrics["perf/max_memory_allocated_gb"] == 3.0
    assert metrics["perf/max_memory_reserved_gb"] == 2.0
    assert metrics["perf/cpu_memory_used_gb"] > 0.01
