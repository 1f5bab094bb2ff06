# SPDX-License-Identifier: Apache-2.0
"""A benchmark that is ended leaves no process behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.chaos.processes import MARK, processes_with

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 300


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_benchmark_that_is_ended_leaves_no_process(number: int, tmp_path: Path) -> None:
    mark = f"benchmark-{os.getpid()}-{number}"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    benchmark = subprocess.Popen(
        [sys.executable, str(ROOT / "benchmarks/cpu_tiny.py"), "--job", "fixed"],
        env={**os.environ, MARK: mark, "TMPDIR": str(tmp_path), "PYTHONPATH": path},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell starts background jobs with SIGINT ignored, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    )
    deadline = time.monotonic() + PATIENCE_S
    # The benchmark, tandem, and tandem's processes for rewards.
    while len(processes_with(mark)) < 3 and time.monotonic() < deadline:
        assert benchmark.poll() is None
        time.sleep(0.1)
    benchmark.send_signal(number)
    assert benchmark.wait(PATIENCE_S) == (128 + number if number == signal.SIGTERM else -number)
    _, left = psutil.wait_procs(processes_with(mark), timeout=PATIENCE_S)
    assert not left
