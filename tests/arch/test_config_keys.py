# SPDX-License-Identifier: Apache-2.0
"""The keys of the configuration: each is read and documented, or is in the table of ignored keys.

A key counts as read if some file of the package outside the schema names it as an attribute. This
is weak for names like ``path``, but catches a key that was declared and forgotten. The folders of
``tandem/config`` import only folders that precede them.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.schema.ignored import ignored_table
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tests.arch.source import Module, dotted, imports, in_folders, parse, project_modules

ROOTS = (RunConfig, SftConfig)
CONFIG_FOLDERS = ("schema", "parse", "derived", "check", "plan")
"""The folders of ``tandem/config``: each may import itself and those before it."""


def config_classes(annotation: object) -> Iterator[type[BaseModel]]:
    """Yield the config classes that an annotation mentions, inside unions and containers too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from config_classes(argument)


def leaves(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield (dotted key, field) of every field that is not a section."""
    for name, field in root.model_fields.items():
        sections = list(config_classes(field.annotation))
        for section in sections:
            yield from leaves(section, f"{prefix}{name}.")
        if not sections:
            yield prefix + name, field


def live_leaves(root: type[BaseModel]) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the leaves that are not ignored."""
    ignored = ignored_table(root)
    return ((key, field) for key, field in leaves(root) if key not in ignored)


def sections_of(root: type[BaseModel]) -> set[type[BaseModel]]:
    """Return the root and every config class below it."""
    found = {root}
    for field in root.model_fields.values():
        for section in config_classes(field.annotation):
            found |= sections_of(section)
    return found


@cache
def attributes_read() -> frozenset[str]:
    """Return the attribute names that the package reads; in the schema only those of ``self``.

    The table of micro-batches names its keys as text, one word a key.
    """
    schema_files = {section.__module__ for root in ROOTS for section in sections_of(root)}
    package = list(in_folders(project_modules(), "tandem"))
    attributes = {
        node.attr
        for module in package
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if module.name not in schema_files or dotted(node.value) == "self"
    }
    table = next(m for m in package if m.name == "tandem.config.derived.microbatches")
    words = {
        node.value
        for node in ast.walk(table.tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    return frozenset(attributes | words)


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_is_read_or_ignored(root: type[BaseModel]) -> None:
    dead = [key for key, _ in live_leaves(root) if key.rpartition(".")[2] not in attributes_read()]
    assert not dead, (
        f"read nowhere (read it, or move it to tandem/config/schema/ignored.py): {dead}"
    )


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_sections_are_frozen_and_forbid_unknown_keys(root: type[BaseModel]) -> None:
    for section in sections_of(root):
        assert section.model_config.get("frozen"), f"{section.__name__} is not frozen"
        assert section.model_config.get("extra") == "forbid", f"{section.__name__} accepts anything"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_says_what_it_means(root: type[BaseModel]) -> None:
    silent = [key for key, field in live_leaves(root) if not field.description]
    assert not silent, f"without a description at the field: {silent}"


def upward_imports(modules: Sequence[Module]) -> Iterator[str]:
    """Yield the imports of a folder of ``tandem/config`` from a folder that follows it."""
    for module in modules:
        parts = module.name.split(".")
        if parts[:2] != ["tandem", "config"] or len(parts) < 4:
            continue
        allowed = CONFIG_FOLDERS[: CONFIG_FOLDERS.index(parts[2]) + 1]
        for name, _ in imports(module):
            target = name.split(".")
            if target[:2] == ["tandem", "config"] and target[2] not in allowed:
                yield f"{module.path} imports {name}"


def test_folders_of_the_configuration_import_only_folders_before_them() -> None:
    assert not list(upward_imports(project_modules()))


def test_an_upward_import_is_seen() -> None:
    path = "tandem/config/derived/made_up.py"
    bad = parse(path, "def f():\n    from tandem.config.check.rules import check_run\n")
    good = parse(path, "from tandem.config.schema.run import RunConfig\n")
    assert list(upward_imports([bad])) and not list(upward_imports([good]))
