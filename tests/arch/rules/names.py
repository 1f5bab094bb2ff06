# SPDX-License-Identifier: Apache-2.0
"""Rules 11, 27, 44 and 46: names, characters and first lines of files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, definitions, in_folders

EMPTY_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "base", "types"})
EMPTY_ENDINGS = ("_utils", "_helpers")
VERSION_WORD = re.compile(r"(^|_)(v\d+|legacy|new|enhanced|improved|deprecated|tmp)(_|$)")
VERSION_CLASS = re.compile(r"(V\d+|Legacy|Enhanced|Improved)(?![a-z])|^New[A-Z]")
SPDX = "# SPDX-License-Identifier: Apache-2.0"
MAX_DOCSTRING_LINES = 10
TYPES_FILE = "tandem/types.py"


def empty_names(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 11: no file named utils, helpers, common, misc, base or types (one types.py only)."""
    for module in modules:
        parts = module.path.removesuffix(".py").split("/")
        bad = [part for part in parts if part in EMPTY_NAMES or part.endswith(EMPTY_ENDINGS)]
        if bad and module.path != TYPES_FILE:
            yield Violation(module.path, f"{bad[0]!r} says nothing: name the thing it holds")


def version_names(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 27: names say what, not which version."""
    for module in modules:
        if any(VERSION_WORD.search(part) for part in module.path.removesuffix(".py").split("/")):
            yield Violation(module.path, "the name tells a version, not a thing")
        for name, node, _ in definitions(module):
            if VERSION_CLASS.search(node.name) or VERSION_WORD.search(node.name.split("_")[-1]):
                yield Violation(f"{module.path}::{name}", "the name tells a version, not a thing")


def ascii_only(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 44: source is ASCII; other characters are written as escapes."""
    for module in modules:
        for number, line in enumerate(module.text.splitlines(), start=1):
            if not line.isascii():
                yield Violation(
                    module.path, f"line {number} is not ASCII: {ascii(line.strip())[:80]}"
                )


def spdx_line(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 46: the first line (after a shebang) is the SPDX line."""
    for module in modules:
        lines = module.text.splitlines()
        first = lines[1:2] if lines and lines[0].startswith("#!") else lines[:1]
        if first != [SPDX]:
            yield Violation(module.path, f"the first line is not {SPDX!r}")


def module_docstring(modules: Sequence[Module]) -> Iterator[Violation]:
    """Principle 2: a file of the package opens with 1-10 lines that say what it is."""
    for module in in_folders(modules, "tandem"):
        first = module.tree.body[0] if module.tree.body else None
        value = getattr(getattr(first, "value", None), "value", None)
        if not isinstance(value, str):
            yield Violation(module.path, "has no module docstring")
        elif value.strip().count("\n") >= MAX_DOCSTRING_LINES:
            yield Violation(
                module.path, f"module docstring of more than {MAX_DOCSTRING_LINES} lines"
            )


def empty_packages(modules: Sequence[Module]) -> Iterator[Violation]:
    """A package file re-exports nothing: an import says in which file a name stands."""
    for module in in_folders(modules, "tandem"):
        allowed = 2 if module.path == "tandem/__init__.py" else 1
        if module.path.endswith("/__init__.py") and len(module.tree.body) > allowed:
            yield Violation(module.path, "holds more than its docstring")
