# SPDX-License-Identifier: Apache-2.0
"""Whether data fits a model, as far as its config.json tells: token ids and positions.

Reads JSON only, so that the plan can ask without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.run import RunConfig
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
