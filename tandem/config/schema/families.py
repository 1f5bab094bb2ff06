# SPDX-License-Identifier: Apache-2.0
"""Model families, named by ``model_type`` in config.json: which of them the native decoder
computes.

The file does not import torch; ``models.families`` defines how a family is computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import UserError

NATIVE_FAMILIES = ("qwen2", "qwen3", "llama")
"""The families that the native decoder computes. transformers computes the others."""
CRITIC_CLASS, REWARD_CLASS = "ForTokenClassification", "ForSequenceClassification"
"""Suffixes of classes of transformers whose head, for one label, is a single number: with a bias,
and without one."""
_HF_ROLLOUT = "actor_rollout_ref.rollout.name=hf"


def require_family(
    hf_config: Mapping[str, Any], *, source: str, is_known: bool, trust_remote_code: bool
) -> None:
    """Raise UserError unless tandem, transformers or the model's own code computes the model.

    Args:
        hf_config: the content of config.json.
        source: the configuration key and its value that name the model, for the message.
        is_known: whether transformers knows the family.
    """
    has_own_code = "auto_map" in hf_config
    if is_known or (trust_remote_code and has_own_code):
        return
    remedy = (
        "Set actor_rollout_ref.model.trust_remote_code=True if you trust the code it comes with"
        if has_own_code
        else f"Use one of {', '.join(NATIVE_FAMILIES)}, or a family that transformers knows, with "
        f"which a policy generates by transformers' generate ({_HF_ROLLOUT})"
    )
    raise UserError(f"{source}: model_type {hf_config['model_type']!r} is unknown. {remedy}.")


def foreign_rollout(family: str, *, is_meant: bool) -> str:
    """The notice that our engine does not generate with a model; it is a warning unless that
    ``is_meant``."""
    notice = (
        f"rollout by transformers' generate, which is slow on accelerators: the native engine "
        f"does not compute this model of type {family!r}, but {', '.join(NATIVE_FAMILIES)}"
    )
    return notice if is_meant else f"{notice}. Set {_HF_ROLLOUT} if that is meant"


def value_head(hf_config: Mapping[str, Any]) -> str | None:
    """Which of the two classes a model is, None if its head is not one number."""
    architectures: Any = hf_config.get("architectures") or ()
    labels = hf_config.get("id2label") or range(hf_config.get("num_labels") or 2)
    if len(labels) != 1:
        return None
    ends = (CRITIC_CLASS, REWARD_CLASS)
    return next((end for name in architectures for end in ends if name.endswith(end)), None)


def require_value_head(hf_config: Mapping[str, Any], *, source: str) -> None:
    """Raise UserError unless the model can be a reward model; ``source`` as above."""
    if value_head(hf_config) is None:
        raise UserError(
            f"{source}: architectures={hf_config.get('architectures')} (config.json): must be "
            "sequence or token classification with one label (id2label). Use a reward model."
        )
