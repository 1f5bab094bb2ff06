# SPDX-License-Identifier: Apache-2.0
"""Rules 12 to 15: who imports whom, where imports stand, and that importing does nothing else."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from tests.arch.layout import ALLOWED, OPEN_TO_ALL, OPTIONAL_PACKAGES, OWNERS, ROOMS
from tests.arch.source import Module, Violation, dotted, functions, imports, in_folders

FORBIDDEN_AT_IMPORT = re.compile(
    r"""^(os\.(putenv|unsetenv|environ\.(setdefault|update|pop|clear)|fork|system|makedirs|mkdir)
    |logging\.(basicConfig|config\..*|disable|captureWarnings)|warnings\.(filterwarnings|simplefilter)
    |(\w+\.)*(setLevel|addHandler|set_start_method|manual_seed|start)
    |torch\.(set_\w+|cuda\.\w+|get_default_device|accelerator\.\w+)|torch\.\w+\.is_available
    |random\.seed|(np|numpy)\.random\.seed|subprocess\.\w+|socket\.\w+|urllib\..*|requests\.\w+|httpx\.\w+
    |threading\.(Thread|Timer)|(concurrent\.futures\.)?(Thread|Process)PoolExecutor
    |(multiprocessing|mp)\.(Process|Pool|Manager|Queue)|asyncio\.(run|new_event_loop|get_event_loop)
    |signal\.\w+|setattr|open|print|input|exec|eval|sys\.path\.\w+|atexit\.register
    |(\w+\.)*(read_text|write_text|read_bytes|write_bytes|mkdir|unlink))$""",
    re.VERBOSE,
)
ENTRY_CONDITION = "__name__ == '__main__'"


def import_table(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 12: rooms import downwards only, lazy and TYPE_CHECKING imports included."""
    for module in in_folders(modules, "tandem"):
        if module.room in ("", "__init__"):
            continue
        if module.room not in ROOMS:
            yield Violation(module.path, f"{module.room!r} is no room of docs/layout.md")
            continue
        for target, node in imports(module):
            if not target.startswith("tandem.") or target == "tandem.__version__":
                continue
            room = target.split(".")[1]
            if room != module.room and room not in ALLOWED[module.room] | OPEN_TO_ALL:
                allowed = ", ".join(sorted(ALLOWED[module.room] | OPEN_TO_ALL))
                message = (
                    f"line {node.lineno}: {module.room} may not import {target} (only {allowed})"
                )
                yield Violation(module.path, message)


def outside_imports(modules: Sequence[Module]) -> Iterator[Violation]:
    """The package never imports tests, examples or benchmarks."""
    for module in in_folders(modules, "tandem"):
        for target, node in imports(module):
            if target.split(".")[0] in ("tests", "examples", "benchmarks"):
                yield Violation(module.path, f"line {node.lineno}: imports {target}")


def package_of(target: str) -> str:
    """The distribution behind an imported name; torch's TensorBoard writer is TensorBoard."""
    return "tensorboard" if ".tensorboard" in target else target.partition(".")[0]


def lazy_imports(module: Module) -> Iterator[tuple[str, str, ast.stmt]]:
    """Imports inside functions as (qualified name of the function, imported name, statement)."""
    for name, node, _ in functions(module):
        body = ast.Module(body=node.body, type_ignores=[])
        for target, statement in imports(Module(module.path, "", body)):
            yield name, target, statement


def import_position(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 13: imports stand at the top; lazily only an optional package in its one adapter."""
    for module in in_folders(modules, "tandem", "examples", "benchmarks"):
        for name, target, statement in lazy_imports(module):
            package = package_of(target)
            owners = OWNERS.get(package, frozenset({module.room}))
            if package not in OPTIONAL_PACKAGES or module.room not in owners | {""}:
                message = f"line {statement.lineno}: {target} is imported inside a function"
                yield Violation(f"{module.path}::{name}", message)


def one_adapter(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 13: an optional package is imported lazily in one file only."""
    files: dict[str, set[str]] = {}
    for module in in_folders(modules, "tandem"):
        for _, target, _ in lazy_imports(module):
            files.setdefault(package_of(target), set()).add(module.path)
    for package in sorted(OPTIONAL_PACKAGES & files.keys()):
        if len(files[package]) > 1:
            places = ", ".join(sorted(files[package]))
            yield Violation(min(files[package]), f"{package} is imported lazily in {places}")


def package_owners(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 14: ray only in runtime, vllm and sglang only in rollout, and so on."""
    for module in in_folders(modules, "tandem"):
        for target, node in imports(module):
            owners = OWNERS.get(package_of(target))
            if owners and module.room not in owners:
                message = f"line {node.lineno}: {target} belongs to {', '.join(sorted(owners))}"
                yield Violation(module.path, message)


def top_level_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that run on import: those of the module and of its classes, ifs and tries."""
    for statement in body:
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == ENTRY_CONDITION:
            continue
        yield statement
        for block in ("body", "orelse", "finalbody"):
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from top_level_statements(getattr(statement, block, []))


def eager_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Everything below ``node`` that runs with it: not the bodies of lambdas."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from eager_nodes(child)


def side_effect(statement: ast.stmt) -> str:
    """What an import would do beyond defining names, or ""."""
    if isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant):
        return f"calls {ast.unparse(statement.value)[:60]}"
    if isinstance(statement, ast.For | ast.While | ast.With | ast.Delete | ast.Global):
        return f"runs a {type(statement).__name__.lower()} statement"
    if isinstance(statement, ast.Assign | ast.AugAssign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
            return f"assigns to {ast.unparse(targets[0])}, which is another object's"
        calls = [n for n in eager_nodes(statement) if isinstance(n, ast.Call)]
        forbidden = [dotted(c.func) for c in calls if FORBIDDEN_AT_IMPORT.match(dotted(c.func))]
        if forbidden:
            return f"calls {forbidden[0]}"
    return ""


def import_effects(modules: Sequence[Module]) -> Iterator[Violation]:
    """Rule 15: importing a module only defines names."""
    for module in in_folders(modules, "tandem"):
        for statement in top_level_statements(module.tree.body):
            effect = side_effect(statement)
            if effect:
                yield Violation(module.path, f"line {statement.lineno}: importing {effect}")
