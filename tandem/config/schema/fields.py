# SPDX-License-Identifier: Apache-2.0
"""What fields are made of: types that accept verl's spellings, and the mark of keys without effect.

Every field of the schema says what it does in its ``description``. A key that is accepted but not
read is made by ``no_effect`` and says why; a section so marked covers all keys below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.config import JsonDict

SECTION = ConfigDict(frozen=True, extra="forbid", coerce_numbers_to_str=True, allow_inf_nan=False)
"""Every section of the schema is frozen and knows all its keys."""

NOT_BUILT = "not built yet"
ENGINE_ONLY = "it tunes an engine that is not built yet; the native engine does not need it"
ALWAYS_PACKED = "batches are always packed without padding, and no result depends on it"

_NO_EFFECT = "no_effect"
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "half": "float16"}
_DEFAULT_SEED = 1
_UNSET = object()


def no_effect(default: Any, description: str, *, why: str, ge: int | None = None) -> Any:
    """The ``Field`` of a key that is accepted and not read.

    Args:
        default: or what makes it, such as a section's class.
    """
    mark: JsonDict = {_NO_EFFECT: why}
    if callable(default):
        return Field(
            default_factory=default, description=description, ge=ge, json_schema_extra=mark
        )
    return Field(default=default, description=description, ge=ge, json_schema_extra=mark)


def no_effect_reason(extra: object) -> str:
    """The reason in a field's ``json_schema_extra``, "" for a key that is read."""
    return str(extra.get(_NO_EFFECT, "")) if isinstance(extra, dict) else ""  # pyright: ignore


def _listed(value: Any) -> Any:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else value


def _listed_groups(value: Any) -> Any:
    return tuple(_listed(group) for group in value) if isinstance(value, list | tuple) else value  # pyright: ignore


def _dtype_name(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _seed(value: Any) -> Any:
    return _DEFAULT_SEED if value is None else value


def follow(values: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    """What is set (by section), where the keys that are not have the values of others that are.

    Args:
        sources: key -> the other one, which may be one that stands before it.
    """
    filled: Any = dict(values)
    for key, source in sources.items():
        node: Any = filled
        for name in source.split("."):
            node = node.get(name, _UNSET) if isinstance(node, dict) else _UNSET  # pyright: ignore
        if node is not _UNSET:
            filled = _with_default(filled, key.split("."), value=node)
    return filled


def _with_default(node: Any, path: Sequence[str], *, value: Any) -> Any:
    """A copy of ``node`` with ``value`` at ``path``, unless something stands there already."""
    if not isinstance(node, dict):
        return node
    name, *below = path
    section = cast(dict[str, Any], node)
    if not below:
        return {name: value} | section
    return section | {name: _with_default(section.get(name, {}), below, value=value)}


Strings = Annotated[tuple[str, ...], BeforeValidator(_listed)]
"""A list of strings; one string stands for a list of itself, null for an empty list."""

StringGroups = Annotated[tuple[Strings, ...], BeforeValidator(_listed_groups)]
"""A list of groups of strings; a bare string is a group of its own."""

Dtype = Annotated[Literal["auto", "bfloat16", "float16", "float32"], BeforeValidator(_dtype_name)]
"""A number format; ``auto`` is the platform's own: bfloat16 on accelerators, float32 on CPU."""

Seed = Annotated[int, BeforeValidator(_seed)]
"""A seed; null, with which verl takes a constant of torch, is the constant 1."""
