# SPDX-License-Identifier: Apache-2.0
"""The quickstart learns on a GPU as it does on a CPU.

README has the accuracies on the CPU before and after.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.machine import Machine

for package in ("pydantic", "hydra", "omegaconf", "pyarrow", "math_verify", "jinja2"):
    pytest.importorskip(package, reason="training runs need it")

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 400


@pytest.mark.slow
def test_the_quickstart_reaches_the_accuracy_of_a_cpu(machine: Machine, tmp_path: Path) -> None:
    if machine.trial:
        pytest.skip("a run of minutes, which on a CPU is no trial")
    ended = subprocess.run(
        [sys.executable, "-m", "tandem.cli.main", "quickstart", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    summary = json.loads(ended.stdout.splitlines()[-1])
    assert summary["accuracy_before"] < 0.6
    assert summary["accuracy_after"] > 0.9
    assert summary["unseen_numbers_after"] > 0.85
