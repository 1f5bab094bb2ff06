# SPDX-License-Identifier: Apache-2.0
"""The argument ``keys`` with sections taken apart, and its union with the keys of other arguments.

A key that is given twice, in sections and by its full name, or by another argument too, is an
error. Whether keys exist and their values fit is checked later, as on the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic import BaseModel

from tandem.config.parse.keys import canonical_name, find_key, in_override_grammar, is_section
from tandem.errors import UserError

_ADDED = "+"


def flat_keys(schema: type[BaseModel], keys: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return keys by their full names, as the user spelled them, without sections.

    Raises:
        UserError: ``keys`` is not a mapping, or has one key twice with different values.
    """
    if not isinstance(keys, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
        remedy = 'Give a dict, such as {"data.train_batch_size": 64}.'
        raise UserError("keys", keys, rule="is not a mapping", remedy=remedy)
    flat: dict[str, Any] = {}
    for name, value in _pairs(schema, keys or {}, section=""):
        if name in flat and in_override_grammar(flat[name]) != in_override_grammar(value):
            rule = f"keys has the value {in_override_grammar(value)} for it too"
            raise UserError(name, flat[name], rule=rule, remedy="Leave one of them out.")
        flat[name] = value
    return flat


def joined_keys(given: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return all keys. Raise UserError if one is given by an argument (``own``) and by ``keys``."""
    for key in given.keys() & own.keys():
        raise UserError(
            key,
            given[key],
            rule="another argument sets this key too",
            remedy="Leave one of them out.",
        )
    return {**given, **own}


def _pairs(
    schema: type[BaseModel], keys: Mapping[str, Any], *, section: str
) -> Iterator[tuple[str, Any]]:
    for part, value in keys.items():
        if not isinstance(part, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError("keys", part, rule="is not a name", remedy="Name a key in quotes.")
        name = f"{section}{part}"
        bare = name.lstrip(_ADDED)
        if isinstance(value, Mapping) and is_section(schema, canonical_name(schema, bare)):
            below = cast(Mapping[str, Any], value)
            yield from _pairs(schema, below, section=f"{name}.")
        else:
            # The sign + means something for unknown keys only.
            yield (name if find_key(schema, bare) is None else bare), value
