# SPDX-License-Identifier: Apache-2.0
"""Rules 41 to 43: what asserts say, how errors are caught, who may print."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, dotted, in_folders

BROAD = frozenset({"Exception", "BaseException"})
LEVELS = "debug|info|warning|error|exception|critical"
LOG_CALL = re.compile(rf"^(\w+\.)*_?log(ger)?\.({LEVELS})$")
ROOT_LOG_CALL = re.compile(rf"^logging\.({LEVELS})$")
OUTPUT = frozenset({"print", "sys.stdout.write", "sys.stderr.write"})

CONSOLE_ROOMS = frozenset({"cli", "quickstart"})
"""The rooms of commands, which print."""


def caught_names(handler: ast.ExceptHandler) -> set[str]:
    """The names of the exceptions of a handler; empty for a bare one."""
    if handler.type is None:
        return set()
    parts = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {dotted(part) for part in parts}


def broad_except(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 42: an except names its exception; a broad one re-raises."""
    for module in in_folders(modules, "tandem", "examples", "benchmarks"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = caught_names(node)
            raises = any(isinstance(child, ast.Raise) for child in ast.walk(node))
            if not names:
                yield Violation(module.path, f"line {node.lineno}: bare except")
            elif names & BROAD and not raises:
                message = f"line {node.lineno}: catches {names & BROAD} and does not raise"
                yield Violation(module.path, message)


def silent_asserts(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 41: an assert states an invariant of ours, in words."""
    for module in in_folders(modules, "tandem"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Assert) and node.msg is None:
                yield Violation(module.path, f"line {node.lineno}: assert without a message")


def console_output(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 43: only the commands print; the rest logs, with lazy %-arguments and its own logger."""
    for module in in_folders(modules, "tandem"):
        for node in ast.walk(module.tree):
            function = dotted(node.func) if isinstance(node, ast.Call) else ""
            is_console = function in ("print", "sys.stdout.write", "sys.stderr.write")
            if is_console and module.room not in CONSOLE_ROOMS:
                yield Violation(module.path, f"line {node.lineno}: {function} outside cli/")
            if ROOT_LOG_CALL.match(function):
                yield Violation(module.path, f"line {node.lineno}: use logging.getLogger(__name__)")
            if LOG_CALL.match(function) and node.args and isinstance(node.args[0], ast.JoinedStr):
                yield Violation(module.path, f"line {node.lineno}: f-string in a log call, use %s")
