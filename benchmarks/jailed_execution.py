# SPDX-License-Identifier: Apache-2.0
"""The cost of an execution of a small program in the jail, beside a fresh interpreter without it.

    PYTHONPATH=. python benchmarks/jailed_execution.py [--count 200] [--modules numpy sympy]

It prints milliseconds: processor time of the program's process, and time on the clock until its
caller has the outcome. The program is ``print(6 * 7)``. Executions follow one another.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from tandem.children.code_jail import CodeJail
from tandem.children.jail import JailLimits

PROGRAM = "print(6 * 7)"
LIMITS = JailLimits(memory_bytes=4 << 30)
NUM_FRESH = 10


def main() -> None:
    """Measure, print, and write the result to ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--modules", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    result = {
        "benchmark": "jailed_execution",
        "date": date.today().isoformat(),
        "command": "python " + " ".join(sys.argv),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
        "user": "root" if os.geteuid() == 0 else "ordinary user",
        "load": os.getloadavg()[0],
        "jailed": asyncio.run(measure_jail(options.count, modules=options.modules)),
        "fresh_interpreter": measure_fresh(options.modules),
    }
    text = json.dumps(result, indent=2)
    sys.stdout.write(text + "\n")
    if options.out is not None:
        options.out.write_text(text + "\n")


async def measure_jail(count: int, *, modules: Sequence[str]) -> dict[str, object]:
    """Return milliseconds of executions whose interpreter has imported ``modules``."""
    cpu_s, wall_s = [], []
    async with CodeJail(modules=modules) as jail:
        begin_s = time.perf_counter()
        protections = await jail.start()
        start_s = time.perf_counter() - begin_s
        for _ in range(count):
            begin_s = time.perf_counter()
            execution = await jail.execute(PROGRAM, LIMITS)
            wall_s.append(time.perf_counter() - begin_s)
            cpu_s.append(execution.cpu_s)
            assert execution.output == "42\n", execution
    return {
        "modules": list(modules),
        "count": count,
        "held_by": {one.name: one.held_by for one in protections},
        "start_ms": round(1000 * start_s, 1),
        "cpu_ms": _summary(cpu_s),
        "wall_ms": _summary(wall_s),
    }


def measure_fresh(modules: Sequence[str]) -> dict[str, object]:
    """Return milliseconds of interpreters that are started for the program, without a jail."""
    source = "".join(f"import {name}\n" for name in modules) + PROGRAM
    cpu_s, wall_s = [], []
    for _ in range(NUM_FRESH):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        begin_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", source], check=True, stdout=subprocess.DEVNULL)
        wall_s.append(time.perf_counter() - begin_s)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return {"count": NUM_FRESH, "cpu_ms": _summary(cpu_s), "wall_ms": _summary(wall_s)}


def _summary(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(1000 * one for one in seconds)
    return {
        "median": round(statistics.median(ordered), 2),
        "lowest": round(ordered[0], 2),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 2),
    }


if __name__ == "__main__":
    main()
