# SPDX-License-Identifier: Apache-2.0
"""Values in config.json that no model has, and those of published models."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.config.derived.model_types import require_types, rope_kind, rope_settings
from tandem.errors import UserError

YARN = {"type": "yarn", "factor": 40, "mscale": 1.0, "original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model_type": "opt", "rope_theta": "x", "num_attention_heads": [2, 4]},
        {"model_type": "phi3", "rope_scaling": {"type": "su", "long_factor": [1.0]}},
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {"factor": 8.0}}},
        {"hidden_size": 64, "num_key_value_heads": None, "head_dim": None, "rms_norm_eps": 1},
        {"rope_scaling": None, "rope_parameters": False, "rope_theta": 1000000},
        {"rope_scaling": YARN, "n_group": None, "moe_layer_freq": 1, "norm_topk_prob": True},
        {"rope_parameters": LLAMA3, "eos_token_id": [128001, 128008], "tie_word_embeddings": False},
        {"layer_types": ["full_attention"] * 2, "attention_bias": 0, "use_sliding_window": None},
        {"model_type": "qwen3_vl", "text_config": {"hidden_size": 8}, "vision_config": {}},
    ],
)
def test_what_models_have_is_accepted(values: dict[str, Any]) -> None:
    content = {"model_type": "qwen3", **values}
    require_types(content)
    assert rope_settings(content) in ({}, *content.values())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"model_type": ["qwen2"]}, "config.json: model_type=[qwen2]: must be text or null. Use"),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures='Qwen2ForCausalLM': must be a list"),
        (
            {"num_attention_heads": 0},
            "num_attention_heads=0: must be an integer from 1 to 10000. Use",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 10000. Use"),
        ({"vocab_size": 10**18}, "must be a positive integer, at most 1000000000. Use"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: must be an integer from 1 to 10000"),
        ({"model_type": "gpt2", "n_layer": 10**9}, "n_layer=1000000000: must be at most 10000"),
        (
            {"model_type": "qwen3_moe", "num_experts": 10**9},
            "num_experts=1000000000: must be an integer from 1 to 10000 or null",
        ),
        (
            {"num_key_value_heads": -1},
            "num_key_value_heads=-1: must be an integer from 1 to 10000 or",
        ),
        ({"head_dim": "x"}, "head_dim='x': must be a positive integer or null"),
        ({"n_group": 0}, "n_group=0: must be a positive integer or null"),
        ({"topk_group": 0}, "topk_group=0: must be a positive integer or null"),
        ({"routed_scaling_factor": 0}, "routed_scaling_factor=0: must be a number above 0"),
        ({"hidden_size": True}, "hidden_size=True: must be a positive integer"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps='x': must be a number of at least 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps=nan: must be a number of at least 0"),
        ({"rope_theta": "x"}, "rope_theta='x': must be a number above 1 or null"),
        ({"rope_theta": 0}, "rope_theta=0: must be a number above 1 or null"),
        ({"rope_parameters": 5}, "rope_parameters=5: must be a mapping or null"),
        ({"rope_scaling": [1]}, "rope_scaling=[1]: must be a mapping or null"),
        ({"rope_scaling": {"factor": "x"}}, "rope_scaling.factor='x': must be a number above 0"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_parameters.rope_theta=0: must be a number"),
        ({"rope_parameters": {"rope_type": 5}}, "rope_parameters.rope_type=5: must be text"),
        ({"max_position_embeddings": "x"}, "max_position_embeddings='x': must be a number or null"),
        (
            {"layer_types": 5},
            "layer_types=5: must be a list of full_attention and",
        ),
        ({"layer_types": ["foo"]}, "layer_types=[foo]: must be a list of full_attention and"),
        ({"hidden_act": 5}, "hidden_act=5: must be text"),
        (
            {"tie_word_embeddings": "yes"},
            "tie_word_embeddings='yes': must be true or false or",
        ),
        ({"eos_token_id": "x"}, "eos_token_id='x': must be an integer, a list of integers or null"),
        ({"eos_token_id": [None]}, "eos_token_id=[None]: must be an integer, a list of integers"),
        ({"quantization_config": 5}, "quantization_config=5: must be a mapping or null"),
        ({"model_type": "opt", "rope_scaling": 5}, "rope_scaling=5: must be a mapping or null"),
        ({"model_type": "qwen3_vl", "vision_config": 5}, "vision_config=5: must be a mapping or"),
        ({"model_type": "qwen3_vl", "text_config": 5}, "text_config=5: must be a mapping or null"),
        (
            {"model_type": "qwen3_vl", "text_config": {"hidden_size": "x"}},
            "config.json: hidden_size='x': must be a positive integer",
        ),
    ],
)
def test_what_no_model_has_is_one_line(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        require_types({"model_type": "qwen2", **values})
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_the_settings_of_rotary_positions_have_two_names() -> None:
    assert rope_settings({"rope_scaling": None}) == {} and rope_kind({}) == "default"
    assert rope_kind({"rope_scaling": YARN, "rope_parameters": LLAMA3}) == "yarn"
    assert rope_kind({"rope_scaling": None, "rope_parameters": LLAMA3}) == "llama3"
