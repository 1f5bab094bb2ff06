# SPDX-License-Identifier: Apache-2.0
"""The second model runner of vLLM, which vLLM chooses on most devices, in tests that run with the
first one, too. vLLM imports it or the other, so that they run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
TIMEOUT_S = 600.0


@pytest.mark.parametrize(
    ("file", "chosen"),
    [
        # On devices, vLLM schedules ahead.
        pytest.param(
            "test_draws.py",
            "scheduling_ahead and (other or interrupts) or random_states",
            id="V6 and V7",
        ),
        pytest.param("test_partial_rollout.py", "", id="V1 and V5"),
        pytest.param("test_prefix_cache.py", "both", id="V4"),
        pytest.param("test_updates.py", "twenty or computes_nothing", id="V2 and V16"),
        pytest.param("test_tensor_parallel.py", "not tied", id="V8"),
    ],
)
def test_the_second_model_runner_passes(file: str, chosen: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        + ["-p", "tests.engines.second_runner", str(FOLDER / file), "-k", chosen],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if "PYTEST" not in name},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert ended.returncode == 0, ended.stdout[-4000:]
    assert " passed" in ended.stdout
