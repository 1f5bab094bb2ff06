# SPDX-License-Identifier: Apache-2.0
"""The schema as a flat table of dotted keys with their defaults, descriptions and conditions.

The override parser, the plan and the documentation read this table and have no list of their own.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.parse.condition import Condition, parse_condition
from tandem.config.schema.dotted import ByName
from tandem.config.schema.fields import READ_IF
from tandem.config.schema.ignored import ignored_table


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the schema.

    Attributes:
        name: the dotted name, e.g. ``data.train_batch_size``.
        default: the value of a key that is not set.
        description: the effect of the key; "" for an ignored key.
        ignored: the reason why the key is accepted without effect; "" for a key that is read.
        read_if: the conditions under which the key is read, those of its sections first.
        is_open: whether it is a free-form mapping, which may have any key below it.
        choices: the values it can take, if they are few.
        is_number: whether its value is a number; True and False are not numbers.
    """

    name: str
    default: Any
    description: str = ""
    ignored: str = ""
    read_if: tuple[Condition, ...] = ()
    is_open: bool = False
    choices: tuple[str, ...] = ()
    is_number: bool = False


@cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, Key]:
    """Return all keys of a schema by name, then its ignored keys. A section is not a key."""
    ignored = {
        name: Key(name, default, ignored=reason, is_open=isinstance(default, dict))
        for name, (default, reason) in ignored_table(schema).items()
    }
    keys = _walk(schema, "", inherited=())
    return {
        key.name: replace(key, read_if=_open_conditions(key, ignored)) for key in keys
    } | ignored


def _open_conditions(key: Key, ignored: Container[str]) -> tuple[Condition, ...]:
    """Return the conditions that can fail: one on an ignored key never changes."""
    return tuple(condition for condition in key.read_if if condition.name not in ignored)


def find_key(schema: type[BaseModel], name: str) -> Key | None:
    """Return the key called ``name``, or the free-form key above it, or None."""
    keys = keys_of(schema)
    if name in keys:
        return keys[name]
    parts = name.split(".")
    above = (keys.get(".".join(parts[:size])) for size in range(len(parts) - 1, 0, -1))
    return next((key for key in above if key is not None and key.is_open), None)


def is_section(schema: type[BaseModel], name: str) -> bool:
    """Return whether ``name`` is a section."""
    return name in _sections(schema)


@cache
def _sections(schema: type[BaseModel]) -> frozenset[str]:
    parts = [name.split(".") for name in keys_of(schema)]
    return frozenset(".".join(above[:size]) for above in parts for size in range(1, len(above)))


def nearest_key(schema: type[BaseModel], name: str) -> str:
    """Return the known key that is most similar to ``name``.

    A key that ends with ``name`` is preferred. Otherwise the last part of the name counts as much
    as the whole name.
    """
    last = name.rpartition(".")[2]

    def likeness(known: str) -> float:
        whole = SequenceMatcher(None, name, known).ratio()
        is_suffix = known.endswith(f".{name}")
        return whole + 2 * is_suffix + SequenceMatcher(None, last, known.rpartition(".")[2]).ratio()

    return max(keys_of(schema), key=likeness)


def _walk(
    schema: type[BaseModel], prefix: str, *, inherited: tuple[Condition, ...]
) -> Iterator[Key]:
    for attribute, field in schema.model_fields.items():
        name = f"{prefix}{field.alias or attribute}"
        conditions = (*inherited, *_conditions(field, schema, prefix=prefix))
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _walk(section, f"{name}.", inherited=conditions)
        else:
            yield Key(
                name=name,
                default=field.get_default(call_default_factory=True),
                description=field.description or "",
                read_if=conditions,
                is_open=get_origin(field.annotation) is dict,
                choices=_choices(field),
                is_number=bool({int, float} & _alternatives(field.annotation)),
            )


def _conditions(field: FieldInfo, schema: type[BaseModel], *, prefix: str) -> Iterator[Condition]:
    extra: Any = field.json_schema_extra or {}
    texts: list[str] = extra.get(READ_IF, [])
    for text in texts:
        yield parse_condition(text, prefix=prefix, siblings=schema.model_fields)


def _alternatives(annotation: Any) -> set[Any]:
    """Return the types of a union, or the type itself."""
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
