# SPDX-License-Identifier: Apache-2.0
"""Rule 43b: docstrings are sentences of plain English, as far as a program can tell.

A function's docstring begins with a verb in the imperative, a class's and a module's with a noun
phrase. No docstring begins with a preposition or a relative word, because such a docstring is a
fragment. Some words that no technical dictionary has are not used at all.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.arch.layout import ROOMS
from tests.arch.source import Function, Module, Violation, in_folders

FINISHED_ROOMS = frozenset(
    {
        "__main__",
        "algorithms",
        "api",
        "checkpoint",
        "cli",
        "comm",
        "config",
        "data",
        "driver",
        "engines",
        "errors",
        "metrics",
        "models",
        "planner",
        "platforms",
        "quickstart",
        "report",
        "rewards",
        "rollout",
        "runtime",
        "testing",
        "trainer",
        "types",
        "weight_sync",
        "workers",
    }
)
UNFINISHED_ROOMS: frozenset[str] = (frozenset(ROOMS) | {"__init__"}) - FINISHED_ROOMS
"""The rooms whose docstrings are still to be rewritten. It shrinks until it can be deleted."""

FOLDER = Path(__file__).parents[1]

FOREIGN_WORDS = re.compile(
    r"\b([Mm]end(?:ed|s|ing)?|[Ii]n vain|[Bb]y and by|lent|[Ww]hoever|whose is)\b"
)
"""Words that stand in no manual of this field."""

VERBS = FOLDER / "verbs.txt"
"""Verbs, in the imperative, that may begin the docstring of a function. Add one that is missing."""

FRAGMENTS = FOLDER / "fragments.txt"
"""First words of fragments. No docstring begins with one of them."""

PROPERTIES = frozenset({"property", "cached_property", "functools.cached_property"})


@cache
def words_of(file: Path) -> frozenset[str]:
    """Read a list of words."""
    return frozenset(file.read_text("utf-8").split())


def first_word(docstring: str) -> str:
    """Return the first word of a docstring in lower case, "" if it begins with no word.

    Example:
        "``plan``: check arguments" begins with a name in code, so that it has no first word.
    """
    match = re.match(r"[A-Za-z][A-Za-z'-]*", docstring.strip())
    return match.group(0).lower() if match else ""


def is_property(node: ast.AST) -> bool:
    """Return whether a definition is a property, which is documented as a noun."""
    decorators = node.decorator_list if isinstance(node, Function) else []
    return any(ast.unparse(decorator) in PROPERTIES for decorator in decorators)


def docstrings(module: Module) -> Iterator[tuple[str, ast.AST, str]]:
    """Yield (qualified name, node, docstring) of the module and of its classes and functions."""
    text = ast.get_docstring(module.tree)
    if text:
        yield "", module.tree, text
    nodes: list[tuple[str, ast.AST]] = [("", module.tree)]
    while nodes:
        prefix, parent = nodes.pop()
        for child in ast.iter_child_nodes(parent):
            is_definition = isinstance(child, Function | ast.ClassDef)
            name = f"{prefix}.{child.name}" if is_definition else prefix
            nodes.append((name, child))
            text = ast.get_docstring(child) if is_definition else None
            if text:
                yield name.removeprefix("."), child, text


def fault(node: ast.AST, docstring: str) -> str:
    """Return what is wrong with the first word of a docstring, or ""."""
    word = first_word(docstring)
    if word in words_of(FRAGMENTS):
        return f"begins with {word!r}: write a sentence, or a noun with its article"
    is_function = isinstance(node, Function) and not is_property(node)
    is_special = is_function and node.name.startswith("__")
    if is_function and not is_special and word and word not in words_of(VERBS):
        return f"begins with {word!r}: begin with a verb (a new one belongs in {VERBS.name})"
    return ""


def plain_docstrings(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 43b: a function's docstring begins with a verb, and no docstring is a fragment."""
    for module in in_folders(modules, "tandem"):
        if module.room not in UNFINISHED_ROOMS:
            for name, node, text in docstrings(module):
                message = fault(node, text)
                if message:
                    yield Violation(f"{module.path}::{name}" if name else module.path, message)


def plain_words(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 43b: no word that a technical dictionary lacks."""
    for module in in_folders(modules, "tandem"):
        if module.room not in UNFINISHED_ROOMS:
            for number, line in enumerate(module.text.splitlines(), start=1):
                for match in FOREIGN_WORDS.finditer(line):
                    yield Violation(module.path, f"line {number}: {match.group(0)!r}")
