# SPDX-License-Identifier: Apache-2.0
"""The check of ``engine_kwargs.vllm`` before anything is loaded.

The arguments that vLLM knows are read from the text of the installed package. Importing vLLM takes
ten seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tandem.rollout.argument_check import ALLOW_UNTESTED, ArgumentRules, argument_types
from tandem.rollout.argument_check import check_arguments as check_against

SECTION = "actor_rollout_ref.rollout.engine_kwargs.vllm"
URLS = "urls"
"""An entry of tandem's own: the servers that generate instead (``rollout.attached``)."""

_ROLLOUT = "actor_rollout_ref.rollout"
_LENGTHS = "data.max_prompt_length and data.max_response_length"
_MODEL = "actor_rollout_ref.model.path"
_MEMORY = f"{_ROLLOUT}.gpu_memory_utilization"
_HAS_KEY: Mapping[str, str] = {
    **{
        name: f"{_ROLLOUT}.{name}"
        for name in (
            "dtype",
            "seed",
            "load_format",
            "max_num_seqs",
            "max_num_batched_tokens",
            "enforce_eager",
            "enable_chunked_prefill",
            "enable_prefix_caching",
            "cudagraph_capture_sizes",
            "disable_log_stats",
            "gpu_memory_utilization",
        )
    },
    "kv_cache_memory_bytes": _MEMORY,
    "enable_sleep_mode": f"{_ROLLOUT}.free_cache_engine",
    "max_model_len": _LENGTHS,
    "model": _MODEL,
    "tokenizer": _MODEL,
    "tensor_parallel_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "quantization": f"{_ROLLOUT}.quantization",
    "quantization_config": f"{_ROLLOUT}.quantization",
    "enable_expert_parallel": f"{_ROLLOUT}.expert_parallel_size",
    "data_parallel_size": "trainer.n_gpus_per_node",
}
"""Arguments that have a key of their own -> that key."""
_IS_TANDEMS: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "logits_processors",
            "logprobs_mode",
            "max_logprobs",
            "speculative_config",
            "spec_method",
            "spec_model",
            "spec_tokens",
            "enable_batch_sharded_sampling",
            "enable_trace_replay",
            "watermark_config",
        ),
        "tandem draws the tokens and returns their log-probs",
    ),
    **dict.fromkeys(
        ("generation_config", "override_generation_config"),
        "sampling follows the keys of the run, not the files of the model",
    ),
    **dict.fromkeys(
        ("skip_tokenizer_init", "tokens_only", "runner", "convert"),
        "vLLM gets and returns token ids",
    ),
    **dict.fromkeys(
        ("async_scheduling", "scheduling_policy", "scheduler_cls"),
        "each token must have the version that drew it, and the check of new weights comes first",
    ),
    **dict.fromkeys(
        ("worker_cls", "worker_extension_cls", "weight_transfer_config"),
        "tandem gives vLLM its weights",
    ),
    **dict.fromkeys(
        (
            "distributed_executor_backend",
            "pipeline_parallel_size",
            "master_addr",
            "master_port",
            "nnodes",
            "node_rank",
            "disable_custom_all_reduce",
        ),
        "vLLM runs in the processes of tandem",
    ),
    **dict.fromkeys(
        ("kv_transfer_config", "kv_offloading_size", "kv_offloading_backend"),
        "a cache outside of vLLM keeps keys and values of old weights",
    ),
    "model_impl": "vLLM would change classes of transformers that the trainer uses too",
    "enable_lora": "vLLM gets the sums of weights and adapters",
}
"""Arguments that nobody else may set -> the reason."""


def check_arguments(given: Mapping[str, Any]) -> None:
    """Raise UserError if ``engine_kwargs.vllm`` has an entry that vLLM or tandem does not take."""
    known = known_arguments() if given else {}
    rules = ArgumentRules(
        SECTION, "vLLM's EngineArgs", _HAS_KEY, _IS_TANDEMS, own=(ALLOW_UNTESTED, URLS)
    )
    check_against(rules, given, known=known)


def passed_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``engine_kwargs.vllm`` that are vLLM's. null means vLLM's default."""
    return {k: value for k, value in given.items() if k != ALLOW_UNTESTED and value is not None}


def known_arguments() -> Mapping[str, Collection[str]]:
    """Return the types of the installed vLLM's EngineArgs by name; none if its source is not there.

    The types are those of ``argument_types``.
    """
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return {}
    file = Path(spec.origin).parent / "engine/arg_utils.py"
    return argument_types([file], class_name="EngineArgs")
