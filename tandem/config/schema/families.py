# SPDX-License-Identifier: Apache-2.0
"""Model families, by ``model_type`` in config.json, and the rules on the models that runs accept.

The file does not import torch; ``models.families`` defines how a family is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import UserError

TEXT_FAMILIES = (
    "qwen2",
    "qwen3",
    "llama",
    "qwen3_moe",
    "qwen2_moe",
    "mixtral",
    "dots1",
    "XdgMoE",
    "glm4_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v3",
)
SEEING_FAMILIES = ("qwen2_5_vl", "qwen3_vl")
"""The families of models that read pictures; ``derived.vision`` says how."""
NATIVE_FAMILIES = (*TEXT_FAMILIES, *SEEING_FAMILIES)
"""The families that the native decoder computes. transformers computes the others."""
CRITIC_CLASS, REWARD_CLASS = "ForTokenClassification", "ForSequenceClassification"
"""Suffixes of the transformers classes whose head is one number: with a bias, and without one."""
_HF_ROLLOUT = "actor_rollout_ref.rollout.name=hf"
_TRUST = {"RUN": "--trust-remote-code"}
"""What trusts a model's own code, by the key of the model; otherwise the key of a run does."""


def require_family(
    hf_config: Mapping[str, Any], *, key: str, path: str, is_known: bool, trust_remote_code: bool
) -> None:
    """Raise UserError unless tandem, transformers or the model's own code computes the model.

    Args:
        hf_config: the content of config.json.
        key, path: the configuration key that names the model, and its value.
        is_known: whether transformers knows the family.
    """
    has_own_code = "auto_map" in hf_config
    if is_known or (trust_remote_code and has_own_code):
        return
    remedy = (
        f"Set {_TRUST.get(key, 'actor_rollout_ref.model.trust_remote_code=True')} if you trust the "
        "code of the model."
        if has_own_code
        else f"Use one of {', '.join(NATIVE_FAMILIES)}, or a family that transformers knows; "
        f"transformers then generates the rollouts ({_HF_ROLLOUT})."
    )
    rule = f"model_type {hf_config['model_type']!r} is unknown"
    raise UserError(key, path, rule=rule, remedy=remedy)


def value_head(hf_config: Mapping[str, Any]) -> str | None:
    """Return ``CRITIC_CLASS`` or ``REWARD_CLASS``; None if the head is not a single number."""
    architectures: Any = hf_config.get("architectures") or ()
    labels = hf_config.get("id2label") or range(hf_config.get("num_labels") or 2)
    if len(labels) != 1:
        return None
    ends = (CRITIC_CLASS, REWARD_CLASS)
    return next((end for name in architectures for end in ends if name.endswith(end)), None)


def require_value_head(hf_config: Mapping[str, Any], *, key: str, path: str) -> None:
    """Raise UserError unless the model can be a reward model.

    Args:
        hf_config: the content of config.json.
        key, path: the configuration key that names the model, and its value.
    """
    if value_head(hf_config) is None:
        raise UserError(
            key,
            path,
            rule=f"architectures={hf_config.get('architectures')} (config.json) must be "
            "sequence or token classification with one label (id2label)",
            remedy="Use a reward model.",
        )
