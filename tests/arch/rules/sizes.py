# SPDX-License-Identifier: Apache-2.0
"""Rules 7 and 8: sizes of files, classes and functions, nesting, branches, parameters."""

from __future__ import annotations

import ast
import statistics
import sys
from collections.abc import Iterator, Sequence

from tests.arch.source import (
    Function,
    Module,
    Violation,
    code_statements,
    definitions,
    functions,
    imports,
    in_folders,
)

MAX_FILE_LINES = 600
MAX_CLASS_LINES = 400
MAX_BODY_LINES = 60
MAX_MEDIAN_BODY_LINES = 12
MAX_MEDIAN_IMPORTED_NAMES = 7
MAX_NESTING = 3
MAX_BRANCHES = 12
MAX_PARAMETERS = 8
MAX_POSITIONAL = 2

CODE = ("tandem", "examples", "benchmarks")
REWARD_SIGNATURE = ("data_source", "solution_str", "ground_truth", "extra_info")
"""verl's signature of a reward function: users write it, so it is not ours to shorten."""

BLOCKS = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.With, ast.AsyncWith, ast.Try, ast.Match)
BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.match_case)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


def body_lines(function: Function | ast.ClassDef) -> int:
    """Lines from the first statement after the docstring to the end."""
    statements = code_statements(function)
    return function.end_lineno - statements[0].lineno + 1 if statements else 0


def file_length(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: a file has at most 600 lines."""
    for module in modules:
        lines = module.text.count("\n")
        if lines > MAX_FILE_LINES:
            yield Violation(
                module.path, f"{lines} lines, at most {MAX_FILE_LINES}: split it by subject"
            )


def definition_length(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: a class has at most 400 lines, the body of a function at most 60."""
    for module in in_folders(modules, *CODE):
        for name, node, _ in definitions(module):
            if isinstance(node, ast.ClassDef):
                lines, limit = node.end_lineno - node.lineno + 1, MAX_CLASS_LINES
            else:
                lines, limit = body_lines(node), MAX_BODY_LINES
            if lines > limit:
                yield Violation(f"{module.path}::{name}", f"{lines} lines, at most {limit}")


def median_body(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: the median function body of the package has at most 12 lines."""
    lengths = [
        body_lines(node)
        for module in in_folders(modules, "tandem")
        for _, node, _ in functions(module)
    ]
    median = statistics.median(lengths) if lengths else 0
    if median > MAX_MEDIAN_BODY_LINES:
        yield Violation("tandem", f"median body {median} lines, at most {MAX_MEDIAN_BODY_LINES}")


def imported_names(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: the median file of the package imports at most 7 names, because each is a place that
    a reader may have to visit. Names of the standard library do not count: readers know them.
    """
    counts = [
        sum(name.split(".")[0] not in sys.stdlib_module_names for name, _ in imports(module))
        for module in in_folders(modules, "tandem")
        if not module.path.endswith("/__init__.py")
    ]
    median = statistics.median(counts) if counts else 0
    if median > MAX_MEDIAN_IMPORTED_NAMES:
        message = f"the median file imports {median} names, at most {MAX_MEDIAN_IMPORTED_NAMES}"
        yield Violation("tandem", message)


def depth(node: ast.AST) -> int:
    """How many blocks stand inside one another below ``node``; an ``elif`` counts as its ``if``."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, SCOPES):
            continue
        is_elif = isinstance(node, ast.If) and [child] == node.orelse and isinstance(child, ast.If)
        deepest = max(deepest, depth(child) + (isinstance(child, BLOCKS) and not is_elif))
    return deepest


def nesting(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: at most 3 blocks inside one another."""
    for module in in_folders(modules, *CODE):
        for name, node, _ in functions(module):
            if depth(node) > MAX_NESTING:
                message = (
                    f"nests {depth(node)} deep, at most {MAX_NESTING}: extract the inner block"
                )
                yield Violation(f"{module.path}::{name}", message)


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below ``node`` but the insides of nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield child
            yield from own_nodes(child)


def branches(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 7: at most 12 branches a function."""
    for module in in_folders(modules, *CODE):
        for name, node, _ in functions(module):
            count = sum(isinstance(child, BRANCHES) for child in own_nodes(node))
            if count > MAX_BRANCHES:
                message = f"{count} branches, at most {MAX_BRANCHES}"
                yield Violation(f"{module.path}::{name}", message)


def named_parameters(node: Function, is_method: bool) -> tuple[list[str], list[str]]:
    """(positional, keyword-only) without self and cls."""
    positional = [argument.arg for argument in node.args.posonlyargs + node.args.args]
    is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in node.decorator_list)
    if is_method and not is_static:
        positional = positional[1:]
    return positional, [argument.arg for argument in node.args.kwonlyargs]


def is_foreign_signature(node: Function, positional: list[str]) -> bool:
    """Signatures that others decree: autograd, modules, dunder methods, callables that a Protocol
    describes, verl's rewards, Triton kernels."""
    decorators = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
    return (
        positional[:1] == ["ctx"]
        or (node.name.startswith("__") and node.name != "__init__")
        or node.name == "forward"
        or tuple(positional) == REWARD_SIGNATURE
        or bool(decorators & {"triton.jit", "triton.autotune"})
    )


def parameters(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 8: at most 8 parameters, all after the second keyword-only."""
    for module in in_folders(modules, *CODE):
        for name, node, is_method in functions(module):
            positional, keyword_only = named_parameters(node, is_method)
            if is_foreign_signature(node, positional):
                continue
            place = f"{module.path}::{name}"
            if len(positional) + len(keyword_only) > MAX_PARAMETERS:
                count = len(positional) + len(keyword_only)
                yield Violation(place, f"{count} parameters, at most {MAX_PARAMETERS}: group them")
            if len(positional) > MAX_POSITIONAL:
                message = f"put a * after {positional[1]!r}: the third parameter on is keyword-only"
                yield Violation(place, message)


def forwards(node: Function, name: str) -> bool:
    """Whether the function hands ``*name`` or ``**name`` on, or only declares it (a Protocol)."""
    for call in (child for child in ast.walk(node) if isinstance(child, ast.Call)):
        starred = [a.value for a in call.args if isinstance(a, ast.Starred)]
        starred += [keyword.value for keyword in call.keywords if keyword.arg is None]
        if any(isinstance(value, ast.Name) and value.id == name for value in starred):
            return True
    statements = code_statements(node)
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in statements)


def open_parameters(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 8: *args and **kwargs only in functions that forward them, or ignore them as *_."""
    for module in in_folders(modules, *CODE):
        for name, node, _ in functions(module):
            for argument in filter(None, (node.args.vararg, node.args.kwarg)):
                is_ignored = not argument.arg.strip("_")
                if not is_ignored and not forwards(node, argument.arg):
                    message = f"*{argument.arg} is not forwarded: name the parameters"
                    yield Violation(f"{module.path}::{name}", message)
