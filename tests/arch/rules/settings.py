# SPDX-License-Identifier: Apache-2.0
"""Rules 19 and 23: config objects are read as they are, and environment variables in few rooms."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, dotted, in_folders

CONFIG_NAME = re.compile(r"(^|[._])(config|cfg|settings)$")
FOREIGN_CONFIG = re.compile(r"(^|[._])(hf_config|pretrained_config|text_config)$|\.model_config$")
"""Configs of other software: Hugging Face's, and pydantic's on a class."""
REFLECTION = frozenset({"getattr", "hasattr", "setattr", "object.__setattr__"})
ENVIRONMENT = re.compile(r"^os\.(environ|getenv|putenv)(\b|$)")
ENVIRONMENT_ROOMS = frozenset({"platforms", "runtime", "testing", "driver", "cli", "trainer"})


def is_config(node: ast.AST) -> bool:
    """Whether the expression is a config object of ours, by its name (``hf_config`` is not)."""
    name = dotted(node)
    return bool(CONFIG_NAME.search(name)) and not FOREIGN_CONFIG.search(name)


def guessed_default(node: ast.AST) -> str:
    """How an expression reads a config with a default of its own, or ""."""
    if not isinstance(node, ast.Call) or not node.args:
        return ""
    function = dotted(node.func)
    if function in REFLECTION and is_config(node.args[0]):
        return f"{function} on {dotted(node.args[0])}"
    if isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "setdefault"):
        return (
            f".{node.func.attr} on {dotted(node.func.value)}" if is_config(node.func.value) else ""
        )
    return ""


def config_defaults(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 19: the schema has the defaults; no getattr, hasattr or .get on config, no mutation."""
    for module in in_folders(modules, "tandem"):
        for node in ast.walk(module.tree):
            guess = guessed_default(node)
            if guess:
                yield Violation(
                    module.path, f"line {node.lineno}: {guess}: the schema has the default"
                )
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Attribute) and is_config(target.value):
                    message = f"line {node.lineno}: assigns to {dotted(target)} after parsing"
                    yield Violation(module.path, message)


def environment_reads(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 23: environment variables are read in platforms, runtime and the commands only."""
    for module in in_folders(modules, "tandem"):
        if module.room in ENVIRONMENT_ROOMS:
            continue
        for node in ast.walk(module.tree):
            name = dotted(node) if isinstance(node, ast.Attribute) else ""
            if ENVIRONMENT.match(name) and name.count(".") == 1:
                yield Violation(
                    module.path, f"line {node.lineno}: {name} outside {sorted(ENVIRONMENT_ROOMS)}"
                )
