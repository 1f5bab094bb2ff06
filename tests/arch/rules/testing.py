# SPDX-License-Identifier: Apache-2.0
"""Rule 47: tests are plain functions, without mocks of our code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.arch.source import Module, Violation, imports, in_folders


def no_test_classes(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 47: no test classes."""
    for module in in_folders(modules, "tests"):
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                yield Violation(f"{module.path}::{node.name}", "write plain test functions")


def no_mocks(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 47: no unittest.mock; a fake that implements the Protocol belongs in tests/fakes."""
    for module in in_folders(modules, "tests"):
        for target, node in imports(module):
            if target.startswith(("unittest", "mock.", "pytest_mock")) or target == "mock":
                yield Violation(module.path, f"line {node.lineno}: imports {target}: write a fake")


def no_test_packages(modules: Sequence[Module]) -> Iterator[Violation]:
    """Folders of tests have no __init__.py (pytest runs with importmode=importlib)."""
    for module in in_folders(modules, "tests"):
        if module.path.endswith("__init__.py"):
            yield Violation(module.path, "remove it")


def asserting_tests(modules: Sequence[Module]) -> Iterator[Violation]:
    """Each test can fail: it asserts, expects a raise, or calls a check function."""
    for module in in_folders(modules, "tests"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if node.name.startswith("test_") and not can_fail(node):
                yield Violation(f"{module.path}::{node.name}", "asserts nothing")


def can_fail(test: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether something in the test states an expectation."""
    text = ast.unparse(test)
    return any(word in text for word in ("assert", "pytest.raises", "pytest.warns", "check_"))
