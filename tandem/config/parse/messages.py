# SPDX-License-Identifier: Apache-2.0
"""The errors about keys and values that the schema refuses, each one line with a remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from tandem.config.parse.grammar import Assignment
from tandem.config.parse.keys import Key, find_key, in_override_grammar
from tandem.config.parse.shares import show_shares
from tandem.config.schema.unbuilt import Unbuilt
from tandem.errors import UserError, shown_value

_SHELL_VARIABLES = {"trainer.nnodes": "WORLD_SIZE", "trainer.experiment_name": "EXP_NAME"}
"""Key -> the shell variable that published scripts take its value from."""

_TASKS_KEY, _RATIOS_KEY = "trainer.separated_node_tasks", "trainer.separated_node_ratios"

Context = Mapping[str, Any]

_RULES: dict[str, Callable[[Context], str]] = {
    "bool_parsing": lambda _: "must be True or False",
    "bool_type": lambda _: "must be True or False",
    "dict_type": lambda _: "must be a mapping like {key:value}",
    "finite_number": lambda _: "must be a finite number",
    "float_parsing": lambda _: "must be a number",
    "float_type": lambda _: "must be a number",
    "greater_than": lambda context: f"must be greater than {_plain(context['gt'])}",
    "greater_than_equal": lambda context: f"must be at least {_plain(context['ge'])}",
    "int_from_float": lambda _: "must be an integer",
    "int_parsing": lambda _: "must be an integer",
    "int_type": lambda _: "must be an integer",
    "less_than": lambda context: f"must be less than {_plain(context['lt'])}",
    "less_than_equal": lambda context: f"must be at most {_plain(context['le'])}",
    "missing": lambda _: "must be given",
    "string_type": lambda _: "must be text",
    "too_long": lambda context: f"must have {context['max_length']} elements",
    "tuple_type": lambda _: "must be a list like [a,b]",
}
"""pydantic's type of error -> the rule to show."""


def _plain(limit: float) -> float:
    """Return a limit without the fraction of a whole number."""
    return int(limit) if float(limit).is_integer() else limit


def describe(schema: type[BaseModel], error: ValidationError, *, tree: Context) -> UserError:
    """Return pydantic's first error about ``tree`` as a UserError."""
    first = error.errors(include_url=False)[0]
    name = ".".join(str(part) for part in first["loc"])
    key = _key_at(schema, name)
    if key is not None:
        # pydantic appends positions in a list, and also the types that the value could have.
        name = ".".join([key.name, *(str(part) for part in first["loc"] if isinstance(part, int))])
    rule = _RULES.get(first["type"])
    context = first.get("ctx", {})
    if key is not None and key.choices:
        broken = f"must be one of {', '.join(key.choices)}"
    else:
        broken = rule(context) if rule else first["msg"][:1].lower() + first["msg"][1:]
    remedy = (key and _remedy_of_pair(key, tree)) or _remedy(key, name)
    return UserError(name, first["input"], rule=broken, remedy=remedy)


def contradiction(first: Assignment, other: Assignment, *, name: str) -> UserError:
    """Return the error about two spellings of the key ``name`` with different values."""
    return UserError(
        first.name,
        first.value,
        rule=f"must not differ from {other.name}={shown_value(other.value)}{_place(first)}, as "
        f"both mean {name}",
        remedy="Leave one of them out.",
    )


def unknown_key(
    assignment: Assignment, nearest: str, *, command: str, is_closed: bool = False
) -> UserError:
    """Return the error about a key that does not exist.

    Args:
        command: the other command if it has the key, else "".
        is_closed: whether its section takes no unknown key, not even with ``+``.
    """
    if command:
        planned = "tandem plan sft" if command == "sft" else "tandem plan"
        return UserError(
            assignment.name,
            assignment.value,
            rule=f"no key of this command{_place(assignment)}, but one of tandem {command}",
            remedy=f"Use tandem {command} ({planned}), or {nearest}.",
        )
    passing = f" (+{assignment.name}=... passes an unknown key with a warning.)"
    return UserError(
        assignment.name,
        assignment.value,
        rule=f"no such key{_place(assignment)}",
        remedy=f"Did you mean {nearest}?{'' if is_closed else passing}",
    )


def empty_value(schema: type[BaseModel], name: str) -> UserError:
    """Return the error about ``key=`` without a value, which is mostly an unset shell variable."""
    variable = _SHELL_VARIABLES.get(name)
    question = f"Is ${variable} set?" if variable else "Is the shell variable behind it set?"
    remedy = f"{question} {_remedy(_key_at(schema, name), name)}"
    return UserError(name, "", rule="value is empty", remedy=remedy)


def not_built(unbuilt: Unbuilt, spelling: str, *, value: Any, is_below: bool = False) -> UserError:
    """Return the error about a key that asks for a capability that is not built.

    Args:
        unbuilt: the capability.
        spelling: the key as it is written.
        value: its value.
        is_below: whether the key is below the one of ``unbuilt``, which has the harmless values.
    """
    default = in_override_grammar(unbuilt.harmless[0])
    setting = "" if is_below else f", or set {spelling}={default}"
    return UserError(
        spelling,
        value,
        rule=f"{unbuilt.capability} is not built",
        remedy=unbuilt.remedy or f"Leave the key out{setting}.",
    )


def not_a_number(key: Key, value: bool) -> UserError:
    """Return the error about True or False for a number, which would otherwise pass as 1 or 0."""
    return UserError(key.name, value, rule="must be a number", remedy=_remedy(key, key.name))


def _place(assignment: Assignment) -> str:
    is_file = assignment.source != Assignment("", None).source
    return f" in {assignment.source}" if is_file else ""


def _key_at(schema: type[BaseModel], name: str) -> Key | None:
    """Return the key of a location that pydantic reports, which may be inside a list."""
    parts = name.split(".")
    found = (find_key(schema, ".".join(parts[:size])) for size in range(len(parts), 0, -1))
    return next((key for key in found if key is not None), None)


def _remedy(key: Key | None, name: str) -> str:
    if key is None or key.default == "":
        return f"Set {name} to a value."
    return f"Set {key.name}={in_override_grammar(key.default)} (the default)."


def _remedy_of_pair(key: Key, tree: Context) -> str:
    """Return a remedy for groups or ratios of tasks that fits the other key; else ""."""
    trainer = tree.get("trainer", {})
    groups, ratios = trainer.get("separated_node_tasks"), trainer.get("separated_node_ratios")
    if key.name == _RATIOS_KEY and groups and isinstance(groups, list | tuple):
        number = len(groups)  # pyright: ignore[reportUnknownArgumentType]
        return (
            f"Set {_RATIOS_KEY}={show_shares([1.0] * number)}, or other numbers above 0 and at "
            f"most 1, one for each of the {number} groups of {_TASKS_KEY}."
        )
    if key.name == _TASKS_KEY and ratios:
        return (
            f"Write groups like [[actor-train,logp,ref_logp],generate], one for each of "
            f"{_RATIOS_KEY}, or leave both keys out."
        )
    return ""
