# SPDX-License-Identifier: Apache-2.0
"""The check of arguments that a user sets for an engine of another package."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from tandem.errors import UserError

ALLOW_UNTESTED = "allow_untested"
"""An entry of tandem's own: whether any version of the package will do."""


_PLAIN: Mapping[str, tuple[tuple[type, ...], str]] = {
    "bool": ((bool,), "True or False"),
    "int": ((int,), "an integer"),
    "float": ((int, float), "a number"),
    "str": ((str,), "text"),
    "list": ((list, tuple), "a list"),
    "dict": ((dict,), "a mapping"),
}
"""Types of values that are checked: their names in annotations, and in messages."""


@dataclass(frozen=True, slots=True)
class ArgumentRules:
    """The arguments that a user may not set.

    Attributes:
        section: the section of the configuration that they come from.
        title: what they are arguments of, for messages.
        has_key: argument -> the key of a run that sets it.
        is_tandems: argument -> why tandem sets it.
        own: entries of the section that are tandem's.
    """

    section: str
    title: str
    has_key: Mapping[str, str]
    is_tandems: Mapping[str, str]
    own: Collection[str]


def check_arguments(
    rules: ArgumentRules, given: Mapping[str, Any], *, known: Mapping[str, Collection[str]]
) -> None:
    """Raise UserError if an argument may not be set, does not exist, or has another type.

    Args:
        known: the arguments that exist, with the names of their types (``argument_types``); empty
            if that is unknown.
    """
    for name, value in given.items():
        if name in rules.has_key:
            rule, remedy = "has a key of its own", f"Set {rules.has_key[name]} instead."
        elif name in rules.is_tandems:
            rule, remedy = f"is set by tandem: {rules.is_tandems[name]}", "Leave it out."
        elif name == ALLOW_UNTESTED and not isinstance(value, bool):
            rule, remedy = "must be True or False", "Leave it out, or set it to True."
        elif name in rules.own or not known:
            continue
        elif name not in known:
            rule, remedy = f"is no argument of {rules.title}", _nearest(name, known)
        elif not _fits(value, known[name]):
            wanted = " or ".join(_PLAIN[kind][1] for kind in known[name])
            rule, remedy = f"must be {wanted}", "Correct it, or leave it out."
        else:
            continue
        raise UserError(f"{rules.section}.{name}", value, rule=rule, remedy=remedy)


def argument_types(files: Iterable[Path], *, class_name: str = "") -> dict[str, tuple[str, ...]]:
    """Return the annotated names of the classes in files, with the plain types that each takes.

    Args:
        files: those that do not exist are left out.
        class_name: the only class to look at; "" for all.

    Returns:
        for each name the types ``bool``, ``int``, ``float``, ``str``, ``list`` and ``dict`` that
        it takes; empty if it takes others, too, or not the same in all classes.
    """
    found: dict[str, tuple[str, ...]] = {}
    for file in filter(Path.is_file, files):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.ClassDef) or class_name not in ("", node.name):
                continue
            for name, kinds in _annotations(node):
                found[name] = kinds if found.get(name, kinds) == kinds else ()
    return found


def _annotations(node: ast.ClassDef) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the annotated names of a class with their plain types."""
    for entry in node.body:
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
            yield entry.target.id, tuple(_plain_types(entry.annotation))


def _plain_types(annotation: ast.expr) -> list[str]:
    """Return the names of plain types; empty if there are others among them."""
    names = list(_names_in(annotation))
    return [name for name in names if name != "None"] if "" not in names else []


def _names_in(annotation: ast.expr) -> Iterator[str]:
    """Yield the name of each type of a union, "" for one that is not plain."""
    match annotation:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _names_in(left)
            yield from _names_in(right)
        case ast.Subscript(value=ast.Name("Optional"), slice=inner):
            yield from _names_in(inner)
        case ast.Subscript(value=ast.Name("Union"), slice=ast.Tuple(elts=parts)):
            for part in parts:
                yield from _names_in(part)
        case ast.Subscript(value=ast.Name("A" | "Annotated"), slice=ast.Tuple(elts=[inner, *_])):
            yield from _names_in(inner)
        case ast.Subscript(value=ast.Name(name)) if name.lower() in _PLAIN:
            yield name.lower()
        case ast.Name(name) if name in _PLAIN:
            yield name
        case ast.Constant(None):
            yield "None"
        case _:
            yield ""


def _fits(value: Any, kinds: Collection[str]) -> bool:
    """Return whether a value has one of the types; null stands for the default of any argument."""
    if value is None or not kinds:
        return True
    return any(
        isinstance(value, _PLAIN[kind][0]) and (kind == "bool") == isinstance(value, bool)
        for kind in kinds
    )


def _nearest(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    return f"Nearest: {', '.join(near)}." if near else "Leave it out."
