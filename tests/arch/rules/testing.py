# SPDX-License-Identifier: Apache-2.0
"""Rule 47: tests are plain functions, without mocks of our code."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence

from tests.arch.source import Function, Module, Violation, dotted, imports, in_folders
from tests.arch.source import functions as all_functions


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
    """Each test can fail: it asserts, checks, expects a raise, or calls a helper that does."""
    tests = list(in_folders(modules, "tests"))
    functions = [(module, node) for module in tests for _, node, _ in all_functions(module)]
    strict = {node.name for _, node in functions if states_expectation(node)}
    for module, node in functions:
        can_fail = states_expectation(node) or called(node) & strict
        if node.name.startswith("test_") and not can_fail:
            yield Violation(f"{module.path}::{node.name}", "asserts nothing")


def states_expectation(function: Function) -> bool:
    """Whether the function itself asserts, expects a raise, or calls what asserts or checks."""
    text = ast.unparse(function)
    return any(word in text for word in ("assert", "check", "pytest.raises", "pytest.warns"))


def called(function: Function) -> set[str]:
    """Plain names of what the function calls."""
    return {
        dotted(node.func).rpartition(".")[2]
        for node in ast.walk(function)
        if isinstance(node, ast.Call)
    }
