# SPDX-License-Identifier: Apache-2.0
"""The keys of a run as arguments of SGLang's ``ServerArgs``. SGLang is not imported."""

from __future__ import annotations

from typing import Any

from tandem.rollout.canary import CANARY_LENGTH
from tandem.rollout.factory import EngineSpec
from tandem.rollout.sglang.keys import passed_arguments
from tandem.rollout.sglang.scheduler import SAMPLER

FREE_POSITIONS = 8
"""SGLang does not use the last positions of a context."""
_MAX_CPU_TOKENS = 1 << 20
"""The most tokens of a cache on a CPU, where SGLang allocates all of it at the start."""


def engine_arguments(spec: EngineSpec, *, max_positions: int) -> dict[str, Any]:
    """Return the arguments for the keys ``actor_rollout_ref.rollout.*`` and the platform.

    Args:
        max_positions: the length of a sequence if ``spec`` does not say it.
    """
    config, on_device = spec.config, spec.platform.device_type != "cpu"
    num_rows = config.max_num_seqs + 1  # one for the canary
    length = max(spec.max_length or max_positions, CANARY_LENGTH)
    dtype = str(spec.model.lm_head_weight.dtype).removeprefix("torch.")
    arguments: dict[str, Any] = {
        "model_path": str(spec.folder),
        "device": spec.platform.device_type,
        "dtype": dtype if config.dtype == "auto" else config.dtype,
        "random_seed": config.seed & 0x7FFFFFFF,
        "load_format": "dummy" if config.load_format.startswith("dummy") else config.load_format,
        "skip_tokenizer_init": True,
        "tp_size": config.ranks_per_engine,
        "context_length": length + FREE_POSITIONS,
        "max_running_requests": num_rows,
        "mem_fraction_static": config.gpu_memory_utilization,
        "chunked_prefill_size": config.max_num_batched_tokens
        if config.enable_chunked_prefill
        else -1,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "disable_radix_cache": not config.enable_prefix_caching,
        "disable_cuda_graph": config.enforce_eager or not on_device,
        "sampling_backend": SAMPLER,
        "sampling_defaults": "openai",  # not those of the folder
        "enable_custom_logit_processor": True,  # requests carry the draw of their sample
        "disable_overlap_schedule": True,  # each token has the version that drew it
        "log_level": "error",
    }
    if config.cudagraph_capture_sizes is not None:
        arguments["cuda_graph_bs_decode"] = list(config.cudagraph_capture_sizes)
    if not on_device:
        arguments["attention_backend"] = "torch_native"
        arguments["max_total_tokens"] = min(num_rows * (length + FREE_POSITIONS), _MAX_CPU_TOKENS)
    return arguments | passed_arguments(config.engine_kwargs.sglang)
