# SPDX-License-Identifier: Apache-2.0
"""The schema as a flat table of dotted keys with their defaults, descriptions and conditions.

A condition, which the schema writes in ``read_if``, says when a key is read.
The override parser, the plan and the documentation read this table and have no list of their own.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from operator import attrgetter
from types import MappingProxyType, NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.parse.names import ALIASES, key_of_trl
from tandem.config.schema.dotted import ByName
from tandem.config.schema.fields import READ_IF
from tandem.config.schema.ignored import ignored_table, unbuilt_table
from tandem.config.schema.unbuilt import Unbuilt

_FORM = re.compile(r"(?P<name>[\w.]+)(?P<operator>!=|<=|=|>)(?P<value>[^: ]+)(: (?P<why>.+))?")
_KINDS = MappingProxyType(
    {bool: "True or False", int: "an integer", float: "a number", str: "text"}
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A comparison of a key, or of a property of the configuration, with fixed values.

    Attributes:
        name: the dotted name from the root.
        operator: ``=``, ``!=``, ``>`` or ``<=``.
        values: the values in the grammar of overrides; one unless the operator is ``=``.
        reason: the reason to show if the condition does not hold.
    """

    name: str
    operator: str
    values: tuple[str, ...]
    reason: str

    def holds(self, config: Any) -> bool:
        """Return whether the condition holds for a configuration."""
        value = attrgetter(self.name)(config)
        match self.operator:
            case "=":
                return in_override_grammar(value) in self.values
            case "!=":
                return in_override_grammar(value) not in self.values
            case ">":
                return value > float(self.values[0])
            case _:
                return value <= float(self.values[0])


def parse_condition(text: str, *, prefix: str, siblings: Container[str]) -> Condition:
    """Parse an argument of ``read_if``.

    Args:
        text: the condition, e.g. ``"enable=True"``.
        prefix: the section of the field, with a trailing dot.
        siblings: the fields of that section; a name that begins with one of them is relative to it.
    """
    match = _FORM.fullmatch(text)
    assert match is not None, f"read_if({text!r}) is not a condition"
    name, operator, value = match["name"], match["operator"], match["value"]
    full = f"{prefix}{name}" if name.split(".")[0] in siblings else name
    reason = match["why"] or f"it is read only with {full}{operator}{value}"
    return Condition(full, operator, tuple(value.split("|")), reason)


def in_override_grammar(value: Any) -> str:
    """Return a value in the grammar of overrides."""
    if value is None:
        return "null"
    if isinstance(value, list | tuple):
        return f"[{','.join(in_override_grammar(entry) for entry in value)}]"  # pyright: ignore
    if isinstance(value, dict):
        pairs = (f"{k}:{in_override_grammar(v)}" for k, v in value.items())  # pyright: ignore
        return "{" + ",".join(pairs) + "}"
    return str(value)


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the schema.

    Attributes:
        name: the dotted name, e.g. ``data.train_batch_size``.
        default: the value of a key that is not set.
        description: the effect of the key; "" for an ignored key.
        ignored: the reason why the key is accepted without effect; "" for a key that is read.
        unbuilt: the capability that an ignored key asks for with other values than harmless ones.
        read_if: the conditions under which the key is read, those of its sections first.
        is_open: whether it is a free-form mapping, which may have any key below it.
        choices: the values it can take, if they are few.
        is_number: whether its value is a number; True and False are not numbers.
        kind: the type of its value, in words.
    """

    name: str
    default: Any
    description: str = ""
    ignored: str = ""
    unbuilt: Unbuilt | None = None
    read_if: tuple[Condition, ...] = ()
    is_open: bool = False
    choices: tuple[str, ...] = ()
    is_number: bool = False
    kind: str = ""

    @property
    def accepts_null(self) -> bool:
        """Whether null is a value of its own, or has no effect as all values of the key."""
        return bool(self.ignored) or self.kind.endswith("null")


@cache
def keys_of(schema: type[BaseModel]) -> Mapping[str, Key]:
    """Return all keys of a schema by name, then its ignored keys. A section is not a key."""
    unbuilt = unbuilt_table(schema)
    ignored = {
        name: Key(
            name,
            default,
            ignored=reason,
            unbuilt=unbuilt.get(name),
            is_open=isinstance(default, dict),
        )
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

    The key that means a name of TRL is preferred, then a key that ends with ``name``. Otherwise the
    last part of the name counts as much as the whole name.
    """
    meant = key_of_trl(name, keys_of(schema))
    if meant is not None:
        return meant
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
                kind=_kind(field.annotation),
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


def _kind(annotation: Any) -> str:
    """Return the type of a value in words."""
    types = _alternatives(annotation)
    words = [word for kind, word in _KINDS.items() if kind in types]
    is_list = any(get_origin(one) in (tuple, list) for one in types)
    words += ["a list"] if is_list else []
    words += ["a mapping"] if any(get_origin(one) is dict for one in types) else []
    return " or ".join([*(words or ["text"]), *(["null"] if NoneType in types else [])])


def _choices(field: FieldInfo) -> tuple[str, ...]:
    if int in _alternatives(field.annotation):
        return ()  # a number, or one of some words
    named = (mark.choices for mark in field.metadata if isinstance(mark, ByName))
    return next(named, _literals(field.annotation))


def _literals(annotation: Any) -> tuple[str, ...]:
    if get_origin(annotation) is Literal:
        return tuple(str(choice) for choice in get_args(annotation))
    return tuple(choice for part in get_args(annotation) for choice in _literals(part))


def canonical_name(
    schema: type[BaseModel], name: str, *, spellings: Mapping[str, str] = ALIASES
) -> str:
    """Return the key that ``name`` means in this schema; ``name`` itself if it is not an alias."""
    found = find_key(schema, name)
    # A whole section without effect may have keys that mean others.
    if (found is not None and not found.ignored) or is_section(schema, name):
        return name
    parts = name.split(".")
    for size in range(len(parts), 0, -1):
        meant = spellings.get(".".join(parts[:size]))
        if meant is None:
            continue
        full = ".".join([meant, *parts[size:]])
        if find_key(schema, full) is not None or is_section(schema, full):
            return full
        return canonical_name(schema, full, spellings=spellings)
    return name
