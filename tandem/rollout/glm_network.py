# SPDX-License-Identifier: Apache-2.0
"""Models that vLLM and SGLang compute under the name of another family, which is the same network.

They have neither dots.llm1 nor red-moe. Both are GLM-4.5 with heads that are rotated whole: their
experts are chosen by sigmoid scores and a correction, and there are shared experts and dense layers
before them. The canary compares their log-probs after each update, as for all models.

The file does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.config.derived.experts import experts_of

SAME_AS_GLM = ("dots1", "XdgMoE")
"""The families, by ``model_type``."""
GLM_CLASS = "Glm4MoeForCausalLM"
_LEFT_OUT = ("auto_map", "layer_types", "max_window_layers", "sliding_window")


def difference_from_glm(hf_config: Mapping[str, Any]) -> str:
    """Return why a model of ``SAME_AS_GLM`` is not one of GLM's; "" if it is.

    Args:
        hf_config: the content of config.json.
    """
    experts = experts_of(hf_config)
    if experts is None or not experts.shared_inner:
        return "all layers with experts need shared ones"
    if experts.scoring != "sigmoid":
        return f"experts are chosen by {experts.scoring}, not by sigmoid"
    if experts.dense_layers != tuple(range(len(experts.dense_layers))):
        return "dense layers stand between layers with experts"
    if hf_config.get("attention_bias"):
        return "attention has biases"
    if hf_config.get("tie_word_embeddings"):
        return "the head is tied to the embedding"
    return ""


def config_as_glm(hf_config: Mapping[str, Any], *, head_dim: int) -> dict[str, Any] | None:
    """Return the config.json of GLM's family for a model; None if the engines know its own."""
    if hf_config.get("model_type") not in SAME_AS_GLM:
        return None
    experts = experts_of(hf_config)
    assert experts is not None, "other models were refused"
    has_norms = hf_config["model_type"] == "dots1" or hf_config.get("qk_layernorm", False)
    config = {name: value for name, value in hf_config.items() if name not in _LEFT_OUT}
    config |= {
        "model_type": "glm4_moe",
        "architectures": [GLM_CLASS],
        "head_dim": head_dim,
        "num_key_value_heads": hf_config.get("num_key_value_heads")
        or hf_config["num_attention_heads"],
        "use_qk_norm": has_norms,
        "rms_norm_eps": hf_config.get("rms_norm_eps", 1e-6),
        "partial_rotary_factor": 1.0,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared_inner // experts.inner,
        "first_k_dense_replace": len(experts.dense_layers),
        "norm_topk_prob": experts.is_renormalized,
        "routed_scaling_factor": experts.scale,
        "n_group": experts.num_groups,
        "topk_group": experts.num_kept_groups,
        "num_nextn_predict_layers": 0,
    }
    if hf_config.get("rope_parameters"):
        config["rope_parameters"] = {**hf_config["rope_parameters"], "partial_rotary_factor": 1.0}
    return config


def name_in_glm(name: str, family: str) -> str:
    """Return the name under which the engine's loader knows a tensor of a checkpoint file.

    Args:
        family: the ``model_type`` of the model.
    """
    if family not in SAME_AS_GLM:
        return name
    # red-moe's norms of queries and keys.
    return name.replace(".q_layernorm.", ".q_norm.").replace(".k_layernorm.", ".k_norm.")
