# SPDX-License-Identifier: Apache-2.0
"""Rules 14 and 15 at run time: what importing really does, asked of fresh interpreters."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.arch.rules.imports import top_level_statements
from tests.arch.source import ROOT, in_folders, project_modules

LIGHT_MODULES = ("tandem.config.run", "tandem.config.sft", "tandem.cli.main")
HEAVY_PACKAGES = ("torch", "transformers", "pyarrow", "matplotlib", "tensorboard")

IMPORT_ALL = """
import importlib, json, logging, os, signal, sys, threading
third_party, ours = json.load(sys.stdin)
for name in third_party:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
def state():
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "threads": threading.active_count(),
        "sys.path": list(sys.path),
        "working folder": os.getcwd(),
        "handlers of the root logger": len(root.handlers),
        "level of the root logger": root.level,
        "signal handlers": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM)],
        "torch threads": sys.modules["torch"].get_num_threads() if "torch" in sys.modules else 0,
    }
before = state()
for name in ours:
    importlib.import_module(name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def run_python(code: str, stdin: str = "") -> str:
    """The standard output of a fresh interpreter."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, input=stdin, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def third_party_imports() -> list[str]:
    """The modules that the package's files import at their top from outside it."""
    names: set[str] = set()
    for module in in_folders(project_modules(), "tandem"):
        for statement in top_level_statements(module.tree.body):
            if isinstance(statement, ast.Import):
                names |= {alias.name for alias in statement.names}
            elif isinstance(statement, ast.ImportFrom) and statement.module:
                names.add(statement.module)
    ours = sys.stdlib_module_names | {"tandem"}
    return sorted(name for name in names if name.partition(".")[0] not in ours)


def test_importing_every_module_changes_nothing() -> None:
    ours: Sequence[str] = [module.name for module in in_folders(project_modules(), "tandem")]
    changed = json.loads(run_python(IMPORT_ALL, json.dumps([third_party_imports(), ours])))
    assert not changed, f"importing the package changed {changed}"


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_light_modules_load_no_heavy_package(module: str) -> None:
    code = f"import sys, json, {module}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code)))
    heavy = [package for package in HEAVY_PACKAGES if package in loaded]
    assert not heavy, f"importing {module} loads {heavy}"
