# SPDX-License-Identifier: Apache-2.0
"""Rule 10: inheritance of depth 1 among our own classes."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, dotted, in_folders


def class_bases(modules: Sequence[Module]) -> dict[str, list[str]]:
    """Full class name -> full names of its bases, as far as imports and the file resolve them."""
    bases: dict[str, list[str]] = {}
    for module in modules:
        known = {
            alias.asname or alias.name: f"{node.module}.{alias.name}"
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        classes = [node for node in ast.walk(module.tree) if isinstance(node, ast.ClassDef)]
        known |= {node.name: f"{module.name}.{node.name}" for node in classes}
        for node in classes:
            names = [dotted(base).removesuffix("[]") for base in node.bases]
            bases[f"{module.name}.{node.name}"] = [known.get(name, name) for name in names]
    return bases


def inheritance_depth(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 10: a class of ours may inherit from one of ours, but not from one that itself does."""
    modules = list(in_folders(modules, "tandem"))
    bases = class_bases(modules)
    ours = {name: [base for base in bases[name] if base in bases] for name in bases}
    paths = {module.name: module.path for module in modules}
    for name, parents in ours.items():
        for parent in parents:
            if ours[parent]:
                module, _, short = name.rpartition(".")
                message = f"inherits {parent}, which inherits {ours[parent][0]}: share by functions"
                yield Violation(f"{paths[module]}::{short}", message)
