# SPDX-License-Identifier: Apache-2.0
"""Forked workers of Ray are what fresh ones would be, and end with the process in their place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from tests.fakes.forking import interpreter
from tests.fakes.forking.server import start_forking
from tests.fakes.patience import PATIENCE_S, until

TELLING = """
import json, os, sys
facts = {"arguments": sys.argv[1:], "folder": os.getcwd(), "variable": os.environ["OF_A_TEST"]}
facts |= {"pid": os.getpid(), "name": __name__, "place": sys.path[0]}
facts |= {"torch": "torch" in sys.modules, "ray": "ray" in sys.modules}
print(json.dumps(facts), flush=True)
sys.stdin.readline()
"""


def start_worker(folder: Path) -> tuple[subprocess.Popen[str], dict[str, object]]:
    """Start a program in the place of Ray's worker, and return it and what it says."""
    file = Path(f"{folder}{interpreter.WORKER}")
    file.parent.mkdir(parents=True)
    file.write_text(TELLING)
    forking = start_forking()
    process = subprocess.Popen(
        [forking.executable, str(file), "--one", "two words"],
        cwd=folder,
        env=os.environ | forking.environment | {"OF_A_TEST": "yes"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def test_a_forked_worker_runs_the_same_file_in_the_same_surroundings(tmp_path: Path) -> None:
    process, facts = start_worker(tmp_path)
    pid = facts.pop("pid")
    assert facts == {
        "place": str(Path(f"{tmp_path}{interpreter.WORKER}").parent),
        "arguments": ["--one", "two words"],
        "folder": str(tmp_path),
        "variable": "yes",
        "name": "__main__",
        "torch": True,
        "ray": False,
    }
    assert pid != process.pid
    process.communicate("\n", timeout=PATIENCE_S)  # it ends, and then the process in its place does
    assert process.returncode == 0
    until(lambda: not runs(pid))


def test_a_forked_worker_ends_with_the_process_in_its_place(tmp_path: Path) -> None:
    process, facts = start_worker(tmp_path)
    assert runs(facts["pid"])
    process.kill()
    process.wait()
    until(lambda: not runs(facts["pid"]))


def runs(pid: object) -> bool:
    """Return whether a process has not ended."""
    assert isinstance(pid, int)
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_other_programs_are_run_by_the_usual_interpreter() -> None:
    forking = start_forking()
    code = "import sys; print(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [forking.executable, "-c", code, "a b"], capture_output=True, text=True, check=True
    )
    usual = subprocess.run(
        [sys.executable, "-c", code, "a b"], capture_output=True, text=True, check=True
    )
    assert done.stdout == usual.stdout
