# SPDX-License-Identifier: Apache-2.0
"""Measurements of the machine itself for the accelerator benchmarks."""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tandem.platforms.select import select_platform

_SIDE = 8192
_COPY_BYTES = 1 << 32


def synchronize() -> None:
    """Wait for the device."""
    torch.accelerator.synchronize()


def peak_gib() -> float:
    """Most memory allocated since the start of the process or the last reset."""
    return torch.accelerator.max_memory_allocated() / 2**30


def matmul_rate() -> float:
    """FLOP/s of large bf16 matrix products of random numbers."""
    a = torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(_SIDE, _SIDE, device="cuda", dtype=torch.bfloat16)
    return 2 * _SIDE**3 / median_s(lambda: torch.mm(a, b))


def copy_rate() -> float:
    """Bytes read and written a second by a large copy."""
    a = torch.empty(_COPY_BYTES, device="cuda", dtype=torch.uint8)
    b = torch.empty_like(a)
    return 2 * _COPY_BYTES / median_s(lambda: b.copy_(a))


def median_s(function: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of a call, after three that are not counted."""
    seconds = []
    for repeat in range(3 + repeats):
        synchronize()
        start = time.perf_counter()
        function()
        synchronize()
        if repeat >= 3:
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def tell(report: Mapping[str, Any], output: Path | None) -> None:
    """Print a report as JSON, and keep it in a file."""
    print(json.dumps(report, indent=1))
    if output is not None:
        write(report, output)


def write(report: Mapping[str, Any], output: Path) -> None:
    """Keep a report in a file."""
    output.write_text(json.dumps(report, indent=1) + "\n")


def describe() -> dict[str, str]:
    """Date, machine, versions and command."""
    return {
        "date": date.today().isoformat(),
        "device": select_platform("auto").device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python " + " ".join(sys.argv),
    }
