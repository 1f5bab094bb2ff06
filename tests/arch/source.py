# SPDX-License-Identifier: Apache-2.0
"""The project's Python files as parsed modules, and the queries on syntax trees that rules share.

Nothing of the project is imported here: the rules read source text only.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("tandem", "tests", "examples", "benchmarks")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One Python file. ``path`` is relative to the repository, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The top folder: tandem, tests, examples or benchmarks."""
        return self.path.split("/", 1)[0]

    @property
    def room(self) -> str:
        """The folder or root file of the package it belongs to; "" outside the package."""
        parts = self.path.removesuffix(".py").split("/")
        return parts[1] if parts[0] == "tandem" else ""

    @property
    def name(self) -> str:
        """The dotted module name, e.g. ``tandem.data.files``."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Violation:
    """``place`` is ``path`` or ``path::qualified name``; it is what an exemption names."""

    place: str
    message: str


def parse(path: str, text: str) -> Module:
    """A module from its text, so that the rules can be tried on made-up files."""
    return Module(path, text, ast.parse(text, filename=path))


@cache
def project_modules() -> tuple[Module, ...]:
    """Every Python file of the project, parsed once."""
    files = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return tuple(
        parse(path.relative_to(ROOT).as_posix(), path.read_text("utf-8")) for path in files
    )


def in_folders(modules: Sequence[Module], *folders: str) -> Iterator[Module]:
    """The modules under some of the top folders."""
    return (module for module in modules if module.folder in folders)


def definitions(module: Module) -> Iterator[tuple[str, Function | ast.ClassDef, bool]]:
    """Every function and class as (qualified name, node, whether it is a method)."""

    def walk(
        node: ast.AST, prefix: str, in_class: bool
    ) -> Iterator[tuple[str, Function | ast.ClassDef, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = prefix + child.name
                yield name, child, in_class
                yield from walk(child, f"{name}.", isinstance(child, ast.ClassDef))
            else:
                yield from walk(child, prefix, in_class)

    yield from walk(module.tree, "", False)


def functions(module: Module) -> Iterator[tuple[str, Function, bool]]:
    """Every function as (qualified name, node, whether it is a method)."""
    for name, node, is_method in definitions(module):
        if not isinstance(node, ast.ClassDef):
            yield name, node, is_method


def dotted(node: ast.AST) -> str:
    """``a.b.c`` for a chain of attributes, with ``()`` and ``[]`` for what cannot be named."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return f"{dotted(node.func)}()"
    if isinstance(node, ast.Subscript):
        return f"{dotted(node.value)}[]"
    return ""


def imports(module: Module) -> Iterator[tuple[str, ast.stmt]]:
    """Every imported name, lazy and TYPE_CHECKING ones too; ``a.b`` for ``from a import b``."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            for alias in node.names:
                yield f"{node.module}.{alias.name}", node


def prose(tree: ast.AST) -> set[int]:
    """Identities of constants that explain: strings as statements, ``description=`` of fields."""
    nodes = list(ast.walk(tree))
    notes = [node.value for node in nodes if isinstance(node, ast.Expr)]
    notes += [n.value for n in nodes if isinstance(n, ast.keyword) and n.arg == "description"]
    return {id(note) for note in notes}


def code_statements(node: ast.Module | ast.ClassDef | Function) -> list[ast.stmt]:
    """The body without its docstring."""
    return node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
