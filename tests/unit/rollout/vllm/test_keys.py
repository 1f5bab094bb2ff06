# SPDX-License-Identifier: Apache-2.0
"""``engine_kwargs.vllm``: what vLLM takes, what tandem owns, and what does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.driver.engine_choice import require_engine
from tandem.errors import UserError
from tandem.rollout.vllm.keys import check_arguments, passed_arguments
from tests.fakes.packages import install_vllm

ROLLOUT = "actor_rollout_ref.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs.vllm"


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of version 0.40.0, which tandem was not tested with."""
    monkeypatch.syspath_prepend(install_vllm(tmp_path / "site", version="0.40.0"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("logprobs_mode", "raw_logprobs", "is set by tandem: tandem draws the tokens"),
        ("async_scheduling", True, "is set by tandem: each token must have the version"),
        ("generation_config", "auto", "is set by tandem: sampling follows the keys of the run"),
        ("worker_extension_cls", "a.B", "is set by tandem: tandem gives vLLM its weights"),
        ("distributed_executor_backend", "mp", "is set by tandem: vLLM runs in the processes"),
        ("speculative_config", {}, "is set by tandem: tandem draws the tokens"),
        ("spec_method", "ngram", "is set by tandem: tandem draws the tokens"),
        ("kv_transfer_config", {}, "is set by tandem: a cache outside of vLLM keeps"),
        ("kv_offloading_size", 4.0, "is set by tandem: a cache outside of vLLM keeps"),
        ("enable_lora", True, "is set by tandem: vLLM gets the sums of weights and adapters"),
        ("quantization", "fp8", f"has a key of its own. Set {ROLLOUT}.quantization instead."),
        ("enable_expert_parallel", True, f"Set {ROLLOUT}.expert_parallel_size instead."),
        ("max_num_seqs", 4, f"has a key of its own. Set {ROLLOUT}.max_num_seqs instead."),
        ("kv_cache_memory_bytes", 4, f"Set {ROLLOUT}.gpu_memory_utilization instead."),
        ("max_model_len", 4, "Set data.max_prompt_length and data.max_response_length instead."),
        ("blok_size", 4, "is no argument of vLLM's EngineArgs. Nearest: block_size."),
        ("allow_untested", "maybe", "must be True or False. Leave it out, or set it to True."),
        ("zzz", 4, "is no argument of vLLM's EngineArgs. Leave it out."),
        ("block_size", "many", "must be an integer. Correct it, or leave it out."),
        ("block_size", True, "must be an integer. Correct it, or leave it out."),
        ("disable_cascade_attn", 1, "must be True or False. Correct it, or leave it out."),
        ("served_model_name", 1, "must be text or a list. Correct it, or leave it out."),
    ],
)
def test_what_vllm_does_not_take_is_refused_by_name(name: str, value: object, message: str) -> None:
    with pytest.raises(UserError) as caught:
        check_arguments({"block_size": 32, name: value})
    assert str(caught.value).startswith(f"{KWARGS}.{name}=")
    assert message in str(caught.value)


def test_everything_else_is_passed_through() -> None:
    given = {"block_size": 32, "compilation_config": {"mode": 0}, "disable_cascade_attn": None}
    check_arguments(given | {"allow_untested": True, "served_model_name": ["a", "b"]})
    assert passed_arguments(given | {"allow_untested": True}) == {
        "block_size": 32,
        "compilation_config": {"mode": 0},
    }


def test_an_untested_version_can_be_allowed() -> None:
    named = ["actor_rollout_ref.model.path=a/b", f"{ROLLOUT}.name=vllm"]
    with pytest.raises(UserError, match=r"vLLM 0.40.0 is installed, and >=0.24,<0.33 is supp"):
        require_engine(load_config(RunConfig, named).config)
    require_engine(load_config(RunConfig, [*named, f"{KWARGS}.allow_untested=True"]).config)


def test_more_positions_than_the_model_has_are_refused() -> None:
    keys = ["actor_rollout_ref.model.path=a/b", f"{ROLLOUT}.name=vllm"]
    config = load_config(RunConfig, [*keys, f"{KWARGS}.allow_untested=True"]).config
    require_engine(config, {"model_type": "qwen2", "max_position_embeddings": 1024})
    with pytest.raises(UserError, match=r"= 1024, and vLLM computes at most the 1023 positions"):
        require_engine(config, {"model_type": "qwen2", "max_position_embeddings": 1023})


def test_keys_of_vllm_have_an_effect_with_it_alone() -> None:
    keys = {
        f"{KWARGS}.block_size": "32",
        f"{KWARGS}.swap_space": "4",
        f"{ROLLOUT}.dtype": "bfloat16",
        f"{ROLLOUT}.load_format": "auto",
        f"{ROLLOUT}.enable_chunked_prefill": "False",
        f"{ROLLOUT}.enable_prefix_caching": "False",
        f"{ROLLOUT}.disable_log_stats": "False",
        f"{ROLLOUT}.cudagraph_capture_sizes": "[1,2]",
        f"{ROLLOUT}.skip_tokenizer_init": "False",
    }
    words = [f"{key}={value}" for key, value in keys.items()]
    for name in ("native", "hf"):
        loaded = load_config(RunConfig, [*words, f"{ROLLOUT}.name={name}"])
        assert set(ignored_keys(loaded)) == set(keys)
    loaded = load_config(RunConfig, [*words, f"{ROLLOUT}.name=vllm"])
    assert ignored_keys(loaded) == {
        f"{KWARGS}.swap_space": "vLLM has it no longer",
        f"{ROLLOUT}.skip_tokenizer_init": "engines get and return token ids",
    }
    assert loaded.config.actor_rollout_ref.rollout.engine_kwargs.vllm == {"block_size": 32}
