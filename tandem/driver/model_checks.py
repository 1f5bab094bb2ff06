# SPDX-License-Identifier: Apache-2.0
"""Whether data fits a model, as far as its config.json tells: token ids and positions.

Reads JSON only, so that the plan can ask without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.schema.families import NATIVE_FAMILIES, foreign_rollout, require_family
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError

_POSITION_KEYS = ("max_position_embeddings", "n_positions")
_SCALING_KEYS = ("rope_scaling", "rope_parameters")


def read_local_config(path: str) -> Mapping[str, Any]:
    """config.json of a model folder, {} if there is none to read (the model may be on the hub)."""
    try:
        content = json.loads((Path(path).expanduser() / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def require_local_family(
    hf_config: Mapping[str, Any], *, source: str, trust_remote_code: bool
) -> None:
    """See ``require_family``; nothing is said of a model that is not there.

    Transformers' tables of families are read as text: to import them takes torch, and seconds.
    """
    family = hf_config.get("model_type")
    spec = find_spec("transformers")
    if family is None or family in NATIVE_FAMILIES or spec is None or spec.origin is None:
        return
    tables = (Path(spec.origin).parent / "models/auto").glob("*.py")
    is_known = any(f'"{family}"' in table.read_text(encoding="utf-8") for table in tables)
    require_family(hf_config, source=source, is_known=is_known, trust_remote_code=trust_remote_code)


def rollout_caution(config: RunConfig, hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """A warning if our engine does not generate with the model, unless that is what was meant."""
    family, roles = hf_config.get("model_type"), config.actor_rollout_ref
    if family is None or family in NATIVE_FAMILIES or roles.rollout.name == "hf":
        return ()
    notice = foreign_rollout(family, is_meant=False)
    return (f"actor_rollout_ref.model.path={roles.model.path!r}: {notice}",)


def max_positions(hf_config: Mapping[str, Any]) -> int | None:
    """How long a sequence a model is made for, its rotary scaling included; None if not said."""
    limit = next((hf_config[key] for key in _POSITION_KEYS if hf_config.get(key)), None)
    scaling = next((hf_config[key] for key in _SCALING_KEYS if hf_config.get(key)), {})
    if limit is None or not scaling.get("factor"):
        return limit
    original = scaling.get("original_max_position_embeddings") or limit
    return max(limit, int(original * scaling["factor"]))


def position_caution(
    hf_config: Mapping[str, Any], longest: int, *, keys: str, model: str
) -> tuple[str, ...]:
    """A warning if sequences may become longer than the model is made for, else nothing.

    Args:
        longest: tokens of the longest sequence that can be.
        keys: where that comes from, for the message; ``model`` is the model's key and value.
    """
    limit = max_positions(hf_config)
    if limit is None or longest <= limit:
        return ()
    return (
        f"{keys} = {longest} tokens: {model} is made for {limit} positions; what lies beyond "
        "is poor at best",
    )


def length_caution(config: RunConfig, hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """``position_caution`` of ``tandem train``."""
    data = config.data
    return position_caution(
        hf_config,
        data.max_prompt_length + data.max_response_length,
        keys="data.max_prompt_length + data.max_response_length",
        model=f"actor_rollout_ref.model.path={config.actor_rollout_ref.model.path!r}",
    )


def require_known_tokens(
    token_ids: Iterable[np.ndarray], hf_config: Mapping[str, Any], *, path: str, key: str
) -> None:
    """Raise UserError if the tokenizer gave a token id that the model has no embedding for."""
    num_known = hf_config.get("vocab_size")
    largest = max((int(ids.max()) for ids in token_ids if len(ids)), default=-1)
    if isinstance(num_known, int) and largest >= num_known:
        raise UserError(
            f"{key}={path!r}: its tokenizer gives token id {largest}, its model has only "
            f"{num_known} tokens (vocab_size in config.json). Use the tokenizer of this model."
        )


def require_vocabulary(
    model: Mapping[str, Any], policy: Mapping[str, Any], *, path: str, key: str
) -> None:
    """Raise UserError if the policy can say a token that a model has no embedding for.

    Args:
        model, policy: the contents of their config.json.
        path: of ``model``; ``key`` is where that comes from, for the message.
    """
    num_known, num_said = (known.get("vocab_size") for known in (model, policy))
    if isinstance(num_known, int) and isinstance(num_said, int) and num_known < num_said:
        raise UserError(
            f"{key}={path!r}: it has only {num_known} tokens (vocab_size in "
            f"config.json), the policy {num_said}. Use a model with the policy's tokenizer."
        )
