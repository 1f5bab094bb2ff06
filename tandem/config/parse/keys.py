# SPDX-License-Identifier: Apache-2.0
"""The schema as a flat table of dotted keys: what exists, what it means, what it defaults to.

The override parser, the plan and the documentation read this table and have no list of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.schema.dotted import ByName
from tandem.config.schema.fields import no_effect_reason


@dataclass(frozen=True, slots=True)
class Key:
    """One key of the schema.

    Attributes:
        name: dotted, e.g. ``data.train_batch_size``.
        default: its value when nobody sets it.
        description: what it does.
        no_effect: why it is accepted but not read, "" if it is read.
        is_open: any further key may stand below it (a free-form mapping).
        choices: the values it can take, if they are few.
        is_number: whether it is a number, for which True and False must not pass.
    """

    name: str
    default: Any
    description: str
    no_effect: str
    is_open: bool
    choices: tuple[str, ...]
    is_number: bool


@cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, Key]:
    """All keys of a schema by name, in its order. A section is no key, its fields are."""
    return {key.name: key for key in _walk(schema, "", inherited="")}


def find_key(schema: type[BaseModel], name: str) -> Key | None:
    """The key called ``name``, or the free-form key that ``name`` stands below, or None."""
    keys = keys_of(schema)
    if name in keys:
        return keys[name]
    parts = name.split(".")
    above = (keys.get(".".join(parts[:size])) for size in range(len(parts) - 1, 0, -1))
    return next((key for key in above if key is not None and key.is_open), None)


def is_section(schema: type[BaseModel], name: str) -> bool:
    """Whether keys stand below ``name``."""
    return name in _sections(schema)


@cache
def _sections(schema: type[BaseModel]) -> frozenset[str]:
    parts = [name.split(".") for name in keys_of(schema)]
    return frozenset(".".join(above[:size]) for above in parts for size in range(1, len(above)))


def nearest_key(schema: type[BaseModel], name: str) -> str:
    """The known key that looks most like ``name``: one that ends so, if there is one; else the last
    part counts as much as the whole."""
    last = name.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, name, known).ratio()
        ends_so = known.endswith(f".{name}")
        return whole + 2 * ends_so + SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()

    return max(keys_of(schema), key=likeness)


def _walk(schema: type[BaseModel], prefix: str, *, inherited: str) -> Iterator[Key]:
    for attribute, field in schema.model_fields.items():
        reason = no_effect_reason(field.json_schema_extra) or inherited
        name = field.alias or attribute
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _walk(section, f"{prefix}{name}.", inherited=reason)
        else:
            yield _key(f"{prefix}{name}", field, reason=reason)


def _key(name: str, field: FieldInfo, *, reason: str) -> Key:
    return Key(
        name=name,
        default=field.get_default(call_default_factory=True),
        description=field.description or "",
        no_effect=reason,
        is_open=get_origin(field.annotation) is dict,
        choices=_choices(field),
        is_number=bool({int, float} & _alternatives(field.annotation)),
    )


def _alternatives(annotation: Any) -> set[Any]:
    """The types of a union; of anything else itself."""
    if get_origin(annotation) in (UnionType, Union):
        return set(get_args(annotation))
    return {annotation}


def _choices(field: FieldInfo) -> tuple[str, ...]:
    named = (mark.choices for mark in field.metadata if isinstance(mark, ByName))
    return next(named, _literals(field.annotation))


def _literals(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    return tuple(choice for part in get_args(annotation) for choice in _literals(part))
