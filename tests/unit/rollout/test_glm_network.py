# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM and SGLang compute as GLM-4.5: config.json, names, and which are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from tandem.rollout.choice import problem_of
from tandem.rollout.glm_network import config_as_glm, name_in_glm
from tests.fakes.packages import install_sglang

EXPERTS = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
DOTS = {"model_type": "dots1", "architectures": ["Dots1ForCausalLM"], **EXPERTS}
RED_MOE = {
    "model_type": "XdgMoE",
    "architectures": ["XdgMoEForCausalLM"],
    "auto_map": {"AutoConfig": "configuration.XdgMoEConfig"},
    "scoring_func": "noaux_tc",
    "qk_layernorm": True,
    **EXPERTS,
}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that has GLM's class."""
    folder = install_sglang(tmp_path / "site")
    (folder / "sglang/srt/models/glm4_moe.py").write_text("class Glm4MoeForCausalLM(nn.Module):\n")
    monkeypatch.syspath_prepend(folder)


@pytest.mark.parametrize("model", [DOTS, RED_MOE], ids=["dots1", "red-moe"])
def test_engines_get_the_sizes_under_the_names_of_glm(
    model: dict[str, Any], tmp_path: Path
) -> None:
    found = config_as_glm(model, head_dim=32)
    assert found is not None
    config = AutoConfig.for_model(**found)
    assert (config.model_type, config.architectures) == ("glm4_moe", ["Glm4MoeForCausalLM"])
    assert config.rope_parameters["partial_rotary_factor"] == 1.0
    assert (config.use_qk_norm, config.head_dim, config.rms_norm_eps) == (True, 32, 1e-6)
    assert (config.n_routed_experts, config.n_shared_experts, config.n_group) == (8, 1, 1)
    assert config.norm_topk_prob is (model["model_type"] == "XdgMoE")
    assert config.num_key_value_heads == 2, "as many as heads, where the file has none"
    assert "auto_map" not in found


def test_the_norms_of_red_moe_have_other_names_there() -> None:
    names = ("model.layers.1.self_attn.q_layernorm.weight", "model.layers.1.mlp.gate.weight")
    assert [name_in_glm(name, "XdgMoE") for name in names] == [
        "model.layers.1.self_attn.q_norm.weight",
        names[1],
    ]
    assert [name_in_glm(name, "lfm2") for name in names] == list(names)
    assert config_as_glm({"model_type": "qwen3_moe"}, head_dim=32) is None


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (DOTS, ""),
        (RED_MOE, ""),
        (DOTS | {"n_shared_experts": 0}, "all layers with experts need shared ones"),
        (DOTS | {"attention_bias": True}, "attention has biases"),
        (DOTS | {"tie_word_embeddings": True}, "the head is tied to the embedding"),
        (DOTS | {"moe_layer_freq": 2}, "dense layers stand between layers with experts"),
        (RED_MOE | {"scoring_func": "softmax"}, "experts are chosen by softmax, not by sigmoid"),
    ],
)
def test_a_network_that_glm_is_not_is_refused(model: dict[str, Any], reason: str) -> None:
    problem = problem_of("sglang", model)
    if not reason:
        assert problem is None
        return
    assert problem is not None
    family = model["model_type"]
    assert problem.reason == f"SGLang computes {family!r} as GLM-4.5 alone: {reason}"
