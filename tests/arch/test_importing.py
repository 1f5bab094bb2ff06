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

LIGHT_MODULES = ("tandem.config.schema.run", "tandem.config.schema.sft", "tandem.cli.main")
HEAVY_PACKAGES = ("torch", "transformers", "pyarrow", "matplotlib", "tensorboard")
SELDOM_USED = (
    *("torch._dynamo", "torch._inductor", "triton"),
    *("pyarrow", "tensorboard", "ray", "matplotlib", "pandas", "datasets", "math_verify", "peft"),
)
TRAINING_MODULES = {
    "tandem.driver.train, tandem.driver.sft, tandem.cli.plan_here": (
        *SELDOM_USED,
        *("torch.distributed.fsdp", "torch.distributed.tensor", "sympy"),
    ),
    "tandem.workers.worker": (
        *SELDOM_USED,
        *("transformers", "tokenizers", "hydra", "omegaconf", "jinja2", "PIL", "huggingface_hub"),
    ),
}
"""What a command or a worker of Ray imports before its first work, and what it does not need then:
each of these takes between a tenth of a second and a second."""

IMPORT_ALL = """
import importlib, json, logging, os, signal, sys, threading
third_party, ours = json.load(sys.stdin)
for statement in third_party:
    try:
        exec(statement)
    except ImportError:
        pass
def state():
    root = logging.getLogger()
    return {
        **{"environment " + name: value for name, value in os.environ.items()},
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
keys = sorted(before.keys() | after.keys())
print(json.dumps({k: [before.get(k), after.get(k)] for k in keys if before.get(k) != after.get(k)}))
"""

OPTIMIZER_STEP = """
import sys, torch
from tandem.engines.adamw import AdamW
optimizer = AdamW(betas=(0.9, 0.999), weight_decay=0.01, stored=torch.float32)
optimizer.step({"x": torch.ones(3)}, {"x": torch.ones(3)}, rate=0.1)
print("torch._dynamo" in sys.modules)
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
    """The statements by which the package's files import, at their top, what is not the package's.

    They run first: what other software does when it is imported is not ours to change.
    """
    ours = sys.stdlib_module_names | {"tandem"}
    return sorted(
        {
            ast.unparse(statement)
            for module in in_folders(project_modules(), "tandem")
            for statement in top_level_statements(module.tree.body)
            if isinstance(statement, ast.Import | ast.ImportFrom)
            if imported_module(statement).partition(".")[0] not in ours
        }
    )


def imported_module(statement: ast.Import | ast.ImportFrom) -> str:
    """The module an import statement names first."""
    return statement.names[0].name if isinstance(statement, ast.Import) else statement.module or ""


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


@pytest.mark.parametrize("modules", TRAINING_MODULES)
def test_training_starts_without_what_it_seldom_uses(modules: str) -> None:
    code = f"import sys, json, {modules}; print(json.dumps(sorted(sys.modules)))"
    loaded = set(json.loads(run_python(code)))
    unused = [package for package in TRAINING_MODULES[modules] if package in loaded]
    assert not unused, f"importing {modules} loads {unused}"


def test_a_step_of_an_optimizer_loads_no_compiler() -> None:
    assert run_python(OPTIMIZER_STEP) == "False\n"
