# SPDX-License-Identifier: Apache-2.0
"""Hosts on which a package is not installed: one line that names it and how to get it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.commands import TIMEOUT_S, Ended, check_refusal
from tests.fakes.tiny_run import Material, train_arguments

ROOT = Path(__file__).resolve().parents[2]


def run_without(package: str, arguments: list[str], *, folder: Path) -> Ended:
    """Python imports ``sitecustomize`` first; this one pretends the package is not there."""
    (folder / "sitecustomize.py").write_text(
        "import sys\n"
        "class Missing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Missing())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "tandem.trainer.main_ppo", *arguments[1:]],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    return Ended(ended.returncode, ended.stdout, ended.stderr)


@pytest.mark.parametrize("package", ["hydra", "pydantic", "pyarrow", "torch"])
def test_host_without_a_package(package: str, material: Material, tmp_path: Path) -> None:
    arguments = train_arguments(material, tmp_path / "run", "trainer.n_gpus_per_node=1")
    check_refusal(run_without(package, arguments, folder=tmp_path), package, "nstall")


def test_several_processes_without_ray(material: Material, tmp_path: Path) -> None:
    keys = ("trainer.n_gpus_per_node=2", "trainer.device=cpu")
    ended = run_without("ray", train_arguments(material, tmp_path / "run", *keys), folder=tmp_path)
    check_refusal(
        ended,
        "trainer.n_gpus_per_node=2, trainer.nnodes=1",
        "No module named 'ray'",
        "pip install '.[cluster]'",
    )
