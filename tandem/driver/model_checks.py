# SPDX-License-Identifier: Apache-2.0
"""Checks of data against a model's config.json: token ids and positions.

They read only JSON, and ``tandem plan`` runs them without torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from tandem.config.derived.model_types import require_types, rope_kind, rope_settings
from tandem.config.derived.trained_model import TrainedModel
from tandem.config.derived.vision import text_part
from tandem.config.parse.json_content import read_object
from tandem.config.schema.families import NATIVE_FAMILIES, require_family
from tandem.config.schema.rollout import RolloutConfig
from tandem.errors import UserError

_POSITION_KEYS = ("max_position_embeddings", "n_positions")


def read_local_config(path: str) -> Mapping[str, Any]:
    """Return the config.json of a model folder; {} if it cannot be read (a model on the hub).

    Raises:
        UserError: one of its values has another type than its key.
    """
    try:
        content = read_object(Path(os.path.expanduser(path)) / "config.json")
    except (OSError, ValueError):
        return {}
    require_types(content)
    return content


def require_local_family(
    hf_config: Mapping[str, Any], *, key: str, path: str, trust_remote_code: bool
) -> None:
    """Raise UserError as ``require_family`` does, unless ``hf_config`` is empty.

    Transformers' tables of families are read as text: importing them loads torch, which is slow.
    """
    family = hf_config.get("model_type")
    spec = find_spec("transformers")
    if family is None or family in NATIVE_FAMILIES or spec is None or spec.origin is None:
        return
    tables = (Path(spec.origin).parent / "models/auto").glob("*.py")
    is_known = any(f'"{family}"' in table.read_text(encoding="utf-8") for table in tables)
    require_family(
        hf_config, key=key, path=path, is_known=is_known, trust_remote_code=trust_remote_code
    )


def require_end(
    eos_ids: Sequence[int],
    rollout: RolloutConfig,
    *,
    model: TrainedModel,
    hf_config: Mapping[str, Any],
) -> tuple[str, ...]:
    """Return a warning for each end token that is no token of the model.

    Args:
        eos_ids: the end tokens that its tokenizer and its generation_config.json name.
        hf_config: the content of its config.json.

    Raises:
        UserError: no token can end a response, unless none is wanted.
    """
    num_known = text_part(hf_config).get("vocab_size")
    unknown = [x for x in eos_ids if isinstance(num_known, int) and x >= num_known]
    rule = "neither its tokenizer nor its generation_config.json names an end token"
    if unknown:
        rule = f"its end token {unknown[0]} is none of its {num_known} tokens (vocab_size)"
    if len(unknown) == len(eos_ids) and not rollout.ignore_eos:
        raise UserError(
            model.key,
            model.config.path,
            rule=f"{rule}: every response would have data.max_response_length tokens",
            remedy="Set eos_token in tokenizer_config.json, or "
            "actor_rollout_ref.rollout.ignore_eos=True.",
        )
    return tuple(
        f"{model.key}={model.config.path!r}: the end token {x} is none of the model's {num_known} "
        "tokens (vocab_size)"
        for x in unknown
    )


def max_positions(hf_config: Mapping[str, Any]) -> int | None:
    """Return the model's maximum length in tokens, with rotary scaling; None if it is not given."""
    hf_config = text_part(hf_config)
    limit = next((hf_config[key] for key in _POSITION_KEYS if hf_config.get(key)), None)
    scaling = rope_settings(hf_config)
    if limit is None or not scaling.get("factor"):
        return limit
    original = scaling.get("original_max_position_embeddings") or limit
    return max(limit, int(original * scaling["factor"]))


def position_warnings(
    hf_config: Mapping[str, Any], longest: int, *, keys: str, model: str
) -> tuple[str, ...]:
    """Return a warning if sequences may become longer than the model supports.

    Args:
        longest: the number of tokens of the longest possible sequence.
        keys: the keys that ``longest`` is computed from, for the message.
        model: the model's key and value, for the message.
    """
    limit = max_positions(hf_config)
    if limit is None or longest <= limit:
        return ()
    return (
        f"{keys} = {longest} tokens: {model} is made for {limit} positions; tokens beyond them "
        "are of poor quality at best",
    )


def length_warnings(model: TrainedModel, hf_config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return ``position_warnings`` for the model that a command trains.

    Raises:
        UserError: the keys replace a number of positions that the model's rotary scaling reads.
    """
    replaced = model.config.override_config.max_position_embeddings
    own = text_part(hf_config)
    kind = rope_kind(own)
    if replaced is not None and kind not in ("default", "mrope"):
        key = f"{model.key.removesuffix('path')}override_config.max_position_embeddings"
        raise UserError(
            key,
            replaced,
            rule=f"the model scales its rotary positions ({kind}) by this number of config.json",
            remedy="Leave the key out, or change config.json in a copy of the model's folder.",
        )
    if replaced is not None:
        own = {**own, "max_position_embeddings": replaced}
    return position_warnings(own, model.max_tokens, keys=model.max_tokens_key, model=model.name)


def require_known_tokens(
    token_ids: Iterable[np.ndarray], hf_config: Mapping[str, Any], *, path: str, key: str
) -> None:
    """Raise UserError if a token id of the data has no embedding in the model."""
    num_known = text_part(hf_config).get("vocab_size")
    largest = max((int(ids.max()) for ids in token_ids if len(ids)), default=-1)
    if isinstance(num_known, int) and largest >= num_known:
        raise UserError(
            key,
            path,
            rule=f"its tokenizer gives token id {largest}, but its model has only {num_known} "
            "tokens (vocab_size in config.json)",
            remedy="Use the tokenizer of this model.",
        )


def require_vocabulary(
    model: Mapping[str, Any], policy: Mapping[str, Any], *, path: str, key: str
) -> None:
    """Raise UserError if a token of the policy has no embedding in ``model``.

    Args:
        model, policy: the contents of their config.json.
        path: the path of ``model``, for the message; ``key`` is its configuration key.
    """
    num_known, num_said = (known.get("vocab_size") for known in (model, policy))
    if isinstance(num_known, int) and isinstance(num_said, int) and num_known < num_said:
        raise UserError(
            key,
            path,
            rule=f"it has only {num_known} tokens (vocab_size in config.json), but the policy has "
            f"{num_said}",
            remedy="Use a model with the policy's tokenizer.",
        )
