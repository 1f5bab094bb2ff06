# SPDX-License-Identifier: Apache-2.0
"""config.json to DecoderConfig: transformers' defaults, both forms of the rope keys, refusals."""

import pytest
from transformers import (
    Dots1Config,
    GemmaConfig,
    Glm4MoeConfig,
    LlamaConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tandem.config.schema.families import NATIVE_FAMILIES
from tandem.errors import UserError
from tandem.models.families import FAMILIES, decoder_config
from tandem.models.rotary import Llama3Scaling, RopeConfig, YarnScaling
from tests.unit.models.tiny_models import NATIVE, SIZES

CLASSES = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
    "qwen2_moe": Qwen2MoeConfig,
    "mixtral": MixtralConfig,
    "dots1": Dots1Config,
    "glm4_moe": Glm4MoeConfig,
    "olmoe": OlmoeConfig,
}
NEEDED = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}
NUMBER = {
    "mixtral": "num_local_experts",
    "dots1": "n_routed_experts",
    "glm4_moe": "n_routed_experts",
}
"""The sizes of experts, which have no defaults of ours."""


@pytest.mark.parametrize("family", CLASSES)
def test_defaults_are_those_of_transformers(family):
    sizes = SIZES | NEEDED | {NUMBER.get(family, "num_experts"): 8}
    if family not in ("mixtral", "qwen3_moe", "glm4_moe"):  # whose classes take no None
        sizes["num_key_value_heads"] = None
    few = {key: value for key, value in sizes.items() if value is not None}
    few["model_type"] = family
    full = CLASSES[family](**sizes).to_dict()
    assert decoder_config(few) == decoder_config(full)


@pytest.mark.parametrize(("case", "biases"), [("qwen2_tied", (True, False, False))])
def test_qwen2_biases(case, biases):
    config = decoder_config(NATIVE[case]().to_dict())
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.tie_embeddings
    assert not config.qk_norm


def test_the_plan_knows_our_families():
    assert tuple(FAMILIES) == NATIVE_FAMILIES


def test_llama_biases_follow_the_file():
    config = decoder_config(NATIVE["llama_biases_tied"]().to_dict())
    assert config.qkv_bias and config.o_bias and config.mlp_bias
    plain = decoder_config(NATIVE["llama"]().to_dict())
    assert not (plain.qkv_bias or plain.o_bias or plain.mlp_bias)


def test_qwen3_has_head_norms_and_its_own_head_dim():
    config = decoder_config({"model_type": "qwen3", **SIZES})
    assert config.qk_norm
    assert config.head_dim == 128


def test_old_rope_keys():
    old = {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    assert decoder_config(old).rope == RopeConfig(500000.0, Llama3Scaling(32.0, 1.0, 4.0, 8192))


def test_oldest_rope_key_type():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = decoder_config({"model_type": "qwen2", **SIZES, "rope_scaling": scaling}).rope
    assert isinstance(rope.scaling, YarnScaling)
    assert rope.scaling.attention_factor == pytest.approx(0.1 * 1.3862943611 + 1)


def test_what_the_decoder_lacks_is_left_to_transformers():
    plain = {"model_type": "llama", **SIZES}
    assert decoder_config(plain) is not None
    assert decoder_config(GemmaConfig(**SIZES).to_dict()) is None
    assert decoder_config(plain | {"hidden_act": "gelu"}) is None
    assert decoder_config(plain | {"quantization_config": {"bits": 4}}) is None
    assert decoder_config(plain | {"rope_scaling": {"rope_type": "mrope"}}) is None
    assert decoder_config(plain | {"partial_rotary_factor": 0.5}) is None


def test_sliding_window_is_refused():
    on = {"model_type": "qwen2", **SIZES, "use_sliding_window": True}
    with pytest.raises(UserError, match="use_sliding_window=True: .* Set use_sliding_window"):
        decoder_config(on)
    assert decoder_config(on | {"use_sliding_window": False, "sliding_window": 4096}) is not None


@pytest.mark.parametrize("value", [None, 0, "64"])
def test_missing_size_is_named(value):
    broken = {"model_type": "qwen2", **SIZES, "hidden_size": value}
    with pytest.raises(UserError, match="hidden_size="):
        decoder_config(broken)


@pytest.mark.parametrize(
    ("scaling", "name"),
    [
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor"),
        ({"rope_type": "linear", "factor": None}, "factor"),
        ({"type": "yarn"}, "factor"),
        ({"type": "longrope", "long_factor": [1.0]}, "short_factor"),
    ],
)
def test_missing_rope_key_is_named(scaling, name):
    """transformers refuses these, too."""
    with pytest.raises(UserError, match=f"the key '{name}' is missing"):
        decoder_config({"model_type": "llama", **SIZES, "rope_scaling": scaling})


@pytest.mark.parametrize("values", [{"num_attention_heads": 64}, {"hidden_size": 10**9}])
def test_heads_without_or_with_too_many_numbers_are_refused(values):
    config = {**NATIVE["qwen2_tied"]().to_dict(), "head_dim": None, **values}
    with pytest.raises(UserError, match=r"hidden_size=.*a head has .* and must have 1 to 10000"):
        decoder_config(config)
