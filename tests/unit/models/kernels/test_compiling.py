# SPDX-License-Identifier: Apache-2.0
"""All kernels are compiled for an NVIDIA device, on machines without one, too."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TANDEM = Path(__file__).parents[4] / "tandem"
KERNEL = re.compile(r"@triton\.jit.*\ndef (\w+)\(")


SMALL_DEVICE = 99 << 10
"""The shared memory of a program on NVIDIA's cards for workstations (compute capability 8.6, 8.9
and 12.0), in bytes.
"""


def launched_kernels() -> set[str]:
    """Return the kernels that the package launches: all but those that other kernels call."""
    found = set()
    for file in TANDEM.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        module = ".".join(file.relative_to(TANDEM.parent).with_suffix("").parts)
        for name in KERNEL.findall(text):
            if re.search(rf"\b{name}(\[\(|\.run\()", text):
                found.add(f"{module}.{name}")
    return found


def test_every_kernel_compiles_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="the kernels need triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.fakes.compiled_kernels"]
    done = subprocess.run(
        command, cwd=TANDEM.parent, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    shared_memory = json.loads(done.stdout)
    assert shared_memory.keys() == launched_kernels()
    tiles = shared_memory["tandem.rollout.paged.kernels.tiles._attend_tiles"]
    assert tiles <= SMALL_DEVICE, "a run would end in the middle of its generation"
