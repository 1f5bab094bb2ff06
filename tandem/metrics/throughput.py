# SPDX-License-Identifier: Apache-2.0
"""Speed in verl's terms: ``perf/*``, ``timing_s/*`` and ``timing_per_token_ms/*``.

The formulas are verl's, so that numbers are comparable. Model flops count
``2 * vocab_size * hidden_size`` for embedding and head even if they are tied, half the square for
causal attention, and no recomputation. ``perf/wall_throughput`` is ours: it includes data,
validation and saving.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

from tandem.config.derived.sizes import ModelSizes

_GIB = 1024**3

PEAK_FLOPS = {
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI300X": 1307e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 149.7e12,
    "L40S": 362.05e12,
    "L40": 181.05e12,
    "L20": 119.5e12,
    "910B": 354e12,
    "Ascend910": 354e12,
}
"""Dense bf16 flops per second by a part of the device's name; the longest match applies."""

_SECTIONS_OVER_ALL_TOKENS: tuple[str, ...] = (
    "ref",
    "values",
    "adv",
    "update_critic",
    "update_actor",
)


@dataclass(frozen=True, slots=True)
class ComputeFacts:
    """The model and the devices of a run.

    Attributes:
        sizes: the sizes of the model; None for families without a formula.
        device_name: the name of the devices, which determines their peak.
        num_devices: the number of all devices.
        num_training_devices: the number of devices that compute an update.
    """

    sizes: ModelSizes | None
    device_name: str
    num_devices: int
    num_training_devices: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of a step, and ``wall_s`` since the end of the previous one."""

    step_s: float
    wall_s: float


def peak_flops(device_name: str) -> float:
    """Return the dense bf16 flops per second of the named device, 0 if it is unknown."""
    matches = [name for name in PEAK_FLOPS if name in device_name]
    return PEAK_FLOPS[max(matches, key=len)] if matches else 0.0


def matmul_parameters(sizes: ModelSizes) -> int:
    """Compute ``L * (3*h*I + h*(q+k+v) + q*h) + 2*V*h``.

    In a layer with experts, ``3*h*I`` is that of the chosen experts and the shared one, and the
    router adds ``h*E``.
    """
    return sizes.active_layer_parameters + 2 * sizes.vocabulary * sizes.hidden


def training_flops(sizes: ModelSizes, sequence_lengths: Sequence[int]) -> float:
    """Compute the flops of a forward and backward pass: ``6*N*T + 6*L*heads*head_dim*sum(s^2)``.

    If adapters of A parameters are trained, the products are ``4*N*T + 6*A*T``: a frozen weight has
    no gradient.

    Args:
        sequence_lengths: the tokens of each sequence, prompt and response.
    """
    per_parameter = 4 if sizes.adapters else 6
    per_token = per_parameter * matmul_parameters(sizes) + 6 * sizes.adapters
    dense = per_token * sum(sequence_lengths)
    squares = sum(length * length for length in sequence_lengths)
    return float(dense + 6 * sizes.num_layers * sizes.num_heads * sizes.head_dim * squares)


def model_flops_utilisation(flops: float, seconds: float, *, facts: ComputeFacts) -> float:
    """Return ``flops`` relative to the training devices' peak; 0 if the peak is unknown."""
    available = peak_flops(facts.device_name) * facts.num_training_devices * seconds
    return flops / available if available > 0 else 0.0


def actor_utilisation_metrics(
    sequence_lengths: Sequence[int], *, seconds: float, num_epochs: int, facts: ComputeFacts
) -> dict[str, float]:
    """Compute ``perf/mfu/actor`` of ``num_epochs`` updates over the sequences in ``seconds``."""
    if facts.sizes is None:
        return {"perf/mfu/actor": 0.0}
    flops = num_epochs * training_flops(facts.sizes, sequence_lengths)
    return {"perf/mfu/actor": model_flops_utilisation(flops, seconds, facts=facts)}


def throughput_metrics(num_tokens: int, *, time: StepTime, num_devices: int) -> dict[str, float]:
    """Compute tokens per second per device; ``num_tokens`` counts prompts and responses."""
    return {
        "perf/total_num_tokens": float(num_tokens),
        "perf/time_per_step": time.step_s,
        "perf/throughput": _rate(num_tokens, time.step_s * num_devices),
        "perf/wall_throughput": _rate(num_tokens, time.wall_s * num_devices),
    }


def timing_metrics(
    seconds: Mapping[str, float], *, num_prompt_tokens: int, num_response_tokens: int
) -> dict[str, float]:
    """Compute the metrics of sections' seconds, and of milliseconds per token where they scale.

    ``timing_per_token_ms/gen`` counts response tokens; the others count prompt and response tokens.
    """
    num_all_tokens = num_prompt_tokens + num_response_tokens
    counts: dict[str, int] = dict.fromkeys(_SECTIONS_OVER_ALL_TOKENS, num_all_tokens)
    counts["gen"] = num_response_tokens
    metrics = {f"timing_s/{name}": value for name, value in seconds.items()}
    for name, value in seconds.items():
        if counts.get(name, 0) > 0:
            metrics[f"timing_per_token_ms/{name}"] = value * 1000 / counts[name]
    return metrics


def memory_metrics(allocated_bytes: int, *, reserved_bytes: int) -> dict[str, float]:
    """Convert the peaks of the device's allocator and the host's memory in use to GiB."""
    return {
        "perf/max_memory_allocated_gb": allocated_bytes / _GIB,
        "perf/max_memory_reserved_gb": reserved_bytes / _GIB,
        "perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB,
    }


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0
