# SPDX-License-Identifier: Apache-2.0
"""The check of ``engine_kwargs.sglang`` before anything is loaded.

The arguments that SGLang knows are read from the text of the installed package.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from tandem.rollout.argument_check import (
    ALLOW_UNTESTED,
    ArgumentRules,
    argument_types,
    check_arguments,
)
from tandem.rollout.choice import PACKAGES
from tandem.rollout.installed import find_package

SECTION = "actor_rollout_ref.rollout.engine_kwargs.sglang"
PYTHON = "python"
"""An entry of tandem's own: the interpreter that has SGLang."""

_ROLLOUT = "actor_rollout_ref.rollout"
_LENGTHS = "data.max_prompt_length and data.max_response_length"
_HAS_KEY: Mapping[str, str] = {
    "model_path": "actor_rollout_ref.model.path",
    "tokenizer_path": "actor_rollout_ref.model.path",
    "device": "trainer.device",
    "dtype": f"{_ROLLOUT}.dtype",
    "random_seed": f"{_ROLLOUT}.seed",
    "load_format": f"{_ROLLOUT}.load_format",
    "context_length": _LENGTHS,
    "max_running_requests": f"{_ROLLOUT}.max_num_seqs",
    "mem_fraction_static": f"{_ROLLOUT}.gpu_memory_utilization",
    "chunked_prefill_size": f"{_ROLLOUT}.max_num_batched_tokens",
    "max_prefill_tokens": f"{_ROLLOUT}.max_num_batched_tokens",
    "disable_radix_cache": f"{_ROLLOUT}.enable_prefix_caching",
    "disable_cuda_graph": f"{_ROLLOUT}.enforce_eager",
    "cuda_graph_bs_decode": f"{_ROLLOUT}.cudagraph_capture_sizes",
    "tp_size": f"{_ROLLOUT}.tensor_model_parallel_size",
    "dp_size": "trainer.n_gpus_per_node",
    "enable_memory_saver": f"{_ROLLOUT}.free_cache_engine",
}
_DRAWS = "tandem draws the tokens and returns their log-probs"
_WEIGHTS = "tandem gives SGLang its weights"
_PROCESS = "SGLang runs as a child of tandem's process"
_IS_TANDEMS: Mapping[str, str] = {
    **dict.fromkeys(
        ("sampling_backend", "sampling_defaults", "enable_custom_logit_processor"), _DRAWS
    ),
    "preferred_sampling_params": "sampling follows the keys of the run",
    "incremental_streaming_output": "tandem reads all tokens of a sequence from its last report",
    **dict.fromkeys(
        ("enable_deterministic_inference", "rl_on_policy_target", "speculative_algorithm"), _DRAWS
    ),
    "skip_tokenizer_init": "SGLang gets and returns token ids",
    "disable_overlap_schedule": "each token must have the version that drew it",
    **dict.fromkeys(("custom_weight_loader", "weight_version", "weight_cache_mode"), _WEIGHTS),
    **dict.fromkeys(
        ("enable_hierarchical_cache", "hicache_storage_backend", "enable_lmcache"),
        "a cache outside of the device may keep keys and values of old weights",
    ),
    **dict.fromkeys(("quantization", "enable_lora"), "with SGLang, neither is built"),
    **dict.fromkeys(
        ("pp_size", "ep_size", "nnodes", "node_rank", "dist_init_addr", "host", "port"), _PROCESS
    ),
    **dict.fromkeys(("tokenizer_worker_num", "disaggregation_mode", "server_args"), _PROCESS),
}


def interpreter(given: Mapping[str, Any]) -> str:
    """Return the Python that runs SGLang."""
    return str(given[PYTHON]) if given.get(PYTHON) else sys.executable


def check_sglang_arguments(given: Mapping[str, Any]) -> None:
    """Raise UserError if ``engine_kwargs.sglang`` has an entry that nobody takes."""
    rules = ArgumentRules(
        SECTION, "SGLang's ServerArgs", _HAS_KEY, _IS_TANDEMS, own=(ALLOW_UNTESTED, PYTHON)
    )
    check_arguments(rules, given, known=known_arguments(given) if given else {})


def passed_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of ``engine_kwargs.sglang`` that are SGLang's. null means its default."""
    own = (ALLOW_UNTESTED, PYTHON)
    return {name: value for name, value in given.items() if name not in own and value is not None}


def known_arguments(given: Mapping[str, Any]) -> Mapping[str, Collection[str]]:
    """Return the types of the installed SGLang's ServerArgs by name; none without its source.

    The types are those of ``argument_types``.
    """
    package = PACKAGES["sglang"]
    python = None if interpreter(given) == sys.executable else interpreter(given)
    found = find_package(package.module, package.distributions, interpreter=python)
    if found is None:
        return {}
    groups = found.folder.glob("srt/arg_groups/fields/*.py")
    return argument_types([found.folder / "srt/server_args.py", *groups])
