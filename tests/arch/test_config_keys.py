# SPDX-License-Identifier: Apache-2.0
"""No key is silently without effect: each leaf of the schema is read somewhere, or marked as inert.

A key counts as read if some file of the package outside the schema names it as an attribute. This
is weak for names like ``path``, but catches a key that was declared and forgotten.
"""

from __future__ import annotations

import ast
import typing
from collections.abc import Iterator
from functools import cache

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tests.arch.source import dotted, in_folders, project_modules

ROOTS = (RunConfig, SftConfig)
INERT_MARK = "no_effect"


def config_classes(annotation: object) -> Iterator[type[BaseModel]]:
    """The config classes an annotation mentions, inside unions and containers too."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from config_classes(argument)


def is_inert(field: FieldInfo) -> bool:
    """Whether the schema itself says that the key, or all of the section, has no effect."""
    extra = field.json_schema_extra
    return isinstance(extra, dict) and bool(extra.get(INERT_MARK))


def live_leaves(root: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """(dotted key, field) of every field that is neither a section nor inert."""
    for name, field in root.model_fields.items():
        if is_inert(field):
            continue
        sections = list(config_classes(field.annotation))
        for section in sections:
            yield from live_leaves(section, f"{prefix}{name}.")
        if not sections:
            yield prefix + name, field


def live_sections(root: type[BaseModel]) -> set[type[BaseModel]]:
    """The root and every config class below it that has an effect."""
    found = {root}
    for field in root.model_fields.values():
        for section in config_classes(field.annotation):
            found |= set() if is_inert(field) else live_sections(section)
    return found


@cache
def attributes_read() -> frozenset[str]:
    """Every attribute name that the package reads; in the files of the schema only of ``self``."""
    schema_files = {section.__module__ for root in ROOTS for section in live_sections(root)}
    return frozenset(
        node.attr
        for module in in_folders(project_modules(), "tandem")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        if module.name not in schema_files or dotted(node.value) == "self"
    )


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_is_read_or_marked_inert(root: type[BaseModel]) -> None:
    dead = [key for key, _ in live_leaves(root) if key.rpartition(".")[2] not in attributes_read()]
    assert not dead, (
        f"declared but read nowhere (read it, mark it {INERT_MARK}, or delete it): {dead}"
    )


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_sections_are_frozen_and_forbid_unknown_keys(root: type[BaseModel]) -> None:
    for section in live_sections(root):
        assert section.model_config.get("frozen"), f"{section.__name__} is not frozen"
        assert section.model_config.get("extra") == "forbid", f"{section.__name__} accepts anything"


@pytest.mark.parametrize("root", ROOTS, ids=lambda root: root.__name__)
def test_every_key_says_what_it_means(root: type[BaseModel]) -> None:
    silent = [key for key, field in live_leaves(root) if not field.description]
    assert not silent, f"without a description at the field: {silent}"
