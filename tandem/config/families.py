# SPDX-License-Identifier: Apache-2.0
"""Families of models by their ``model_type`` in config.json: which our own decoder computes, and
what is said of others. Free of torch; how a family is computed is ``models.families``'.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tandem.errors import UserError

NATIVE_FAMILIES = ("qwen2", "qwen3", "llama")
"""Those that our decoder computes. The others are transformers'."""
_MEANT = "actor_rollout_ref.rollout.name=hf"


def require_family(
    hf_config: Mapping[str, Any], *, source: str, is_known: bool, trust_remote_code: bool
) -> None:
    """Raise UserError unless somebody computes the model.

    Args:
        hf_config: the content of config.json.
        source: the configuration key and value it came from, for the message.
        is_known: whether transformers has the family.
    """
    has_own_code = "auto_map" in hf_config
    if is_known or (trust_remote_code and has_own_code):
        return
    remedy = (
        "Set actor_rollout_ref.model.trust_remote_code=True if you trust the code it comes with"
        if has_own_code
        else f"Use one of {', '.join(NATIVE_FAMILIES)}, or a family that transformers knows, with "
        f"which a policy generates by transformers' generate ({_MEANT})"
    )
    raise UserError(f"{source}: model_type {hf_config['model_type']!r} is unknown. {remedy}.")


def foreign_rollout(family: str, *, is_meant: bool) -> str:
    """The notice that our engine does not generate with a model; it is a warning unless that
    ``is_meant``."""
    notice = (
        f"rollout by transformers' generate, which is slow on accelerators: the native engine "
        f"does not compute this model of type {family!r}, but {', '.join(NATIVE_FAMILIES)}"
    )
    return notice if is_meant else f"{notice}. Set {_MEANT} if that is meant"
