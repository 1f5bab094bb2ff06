# SPDX-License-Identifier: Apache-2.0
"""Conditions under which a key is read, as the schema writes them in ``read_if``."""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

_FORM = re.compile(r"(?P<name>[\w.]+)(?P<operator>!=|<=|=|>)(?P<value>[^: ]+)(: (?P<why>.+))?")


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
