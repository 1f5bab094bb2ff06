# SPDX-License-Identifier: Apache-2.0
"""The keys of a run as arguments of vLLM's ``EngineArgs``. vLLM is not imported."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tandem.rollout.canary import CANARY_LENGTH
from tandem.rollout.factory import EngineSpec
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.settings import CacheShape
from tandem.rollout.vllm.keys import passed_arguments

_ON_CPUS = "fp8_per_channel"
"""vLLM's quantization on CPUs, where it lacks the operator that gives a matrix one scale."""
_BLOCK = 128
"""Tokens of a block of vLLM's cache on CPUs, unless ``engine_kwargs.vllm.block_size`` is more."""


def engine_arguments(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments for the keys ``actor_rollout_ref.rollout.*`` and the platform."""
    config, on_device = spec.config, spec.platform.device_type != "cpu"
    num_rows = config.max_num_seqs + 1  # one for the canary
    length = None if spec.max_length is None else max(spec.max_length, CANARY_LENGTH)
    longest_prefill = 0 if config.enable_chunked_prefill else length or 0
    dtype = str(spec.model.lm_head_weight.dtype).removeprefix("torch.")
    arguments = {
        "model": str(spec.folder),
        "dtype": dtype if config.dtype == "auto" else config.dtype,
        "seed": config.seed & 0xFFFFFFFF,
        "load_format": "dummy" if config.load_format.startswith("dummy") else config.load_format,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "max_model_len": -1 if length is None else length,
        "max_num_seqs": num_rows,
        "max_num_batched_tokens": max(num_rows, config.max_num_batched_tokens, longest_prefill),
        "kv_cache_memory_bytes": _cache_bytes(spec, num_rows=num_rows, length=length),
        "enforce_eager": config.enforce_eager or not on_device,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "enable_prefix_caching": config.enable_prefix_caching,
        "tensor_parallel_size": config.ranks_per_engine,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        # Its kernels map the memory of other devices, and each process sees its own alone.
        "disable_custom_all_reduce": True,
        "enable_sleep_mode": config.free_cache_engine and on_device,
        "scheduling_policy": "priority",  # a canary does not wait for samples
        # Scheduled while the device computes the step before. vLLM has no such steps on CPUs.
        "async_scheduling": on_device,
        "disable_log_stats": config.disable_log_stats,
    }
    if on_device:
        # vLLM asks for as much free memory when it starts, although the cache has a fixed size.
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    if config.quantization is not None:
        arguments["quantization"] = config.quantization if on_device else _ON_CPUS
    if config.cudagraph_capture_sizes is not None:
        arguments["cudagraph_capture_sizes"] = list(config.cudagraph_capture_sizes)
    return arguments | passed_arguments(config.engine_kwargs.vllm)


def _cache_bytes(spec: EngineSpec, *, num_rows: int, length: int | None) -> int:
    """Return the size of the cache. What is free at the moment has no influence on it."""
    total, decoder = spec.platform.total_memory_bytes(), spec.model.decoder
    if spec.platform.device_type == "cpu":
        if decoder is None or length is None:
            return total // 16
        # vLLM writes zeros into all of it when it starts: twice what the rows need at most, in
        # fp32. The last block of a row may hold one token, and one block is vLLM's own.
        block = max(_BLOCK, spec.config.engine_kwargs.vllm.get("block_size") or 0)
        shape = replace(CacheShape.of(decoder), dtype=torch.float32)
        needed = (num_rows * (length + block) + block) * shape.bytes_per_token
        return min(total // 16, 2 * needed)
    weights = sum(view.nbytes for _, view in checkpoint_views(spec.model))
    weights //= spec.config.ranks_per_engine
    # The second model runner counts each token of each row, as int32.
    counts = num_rows * spec.model.lm_head_weight.shape[0] * 4
    return max(1, int(total * spec.config.gpu_memory_utilization) - weights - counts)
