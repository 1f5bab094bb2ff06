# SPDX-License-Identifier: Apache-2.0
"""Measure what it costs to judge a program by its tests (``rewards.code_answer``).

    PYTHONPATH=. python benchmarks/judged_programs.py [--output FILE]

Processor time is that of this process and of its children, as this is what a reward process adds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from datetime import date
from pathlib import Path

import psutil

from tandem.rewards.code_answer import compute_score

PROGRAM = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
NUM_RESPONSES = 30


def cpu_s() -> float:
    """Return the processor time of this process, its children, and theirs."""
    own = psutil.Process()
    parts = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(p.user + p.system + p.children_user + p.children_system for p in parts)


def measure(num_tests: int) -> dict[str, float]:
    """Judge the program by this number of tests again and again; return medians."""
    pairs = [(i, 2 * i) for i in range(num_tests)]
    tests = {"inputs": [f"{a} {b}\n" for a, b in pairs], "outputs": [f"{a + b}" for a, b in pairs]}
    clock: list[float] = []
    compute_score("apps", PROGRAM, ground_truth=tests, extra_info={})
    begin_cpu_s = cpu_s()
    for _ in range(NUM_RESPONSES):
        begin_s = time.perf_counter()
        judged = compute_score("apps", PROGRAM, ground_truth=tests, extra_info={})
        assert judged["score"] == 1.0, judged
        clock.append(time.perf_counter() - begin_s)
    return {
        "cpu_ms_mean": 1e3 * (cpu_s() - begin_cpu_s) / NUM_RESPONSES,
        "clock_ms_median": 1e3 * statistics.median(clock),
    }


def main() -> None:
    """Print the results as JSON."""
    parser = argparse.ArgumentParser(
        description="Measure what it costs to judge a program by its tests."
    )
    parser.add_argument("--output", type=Path)
    output = parser.parse_args().output
    report = {
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg()[0],
        "responses": NUM_RESPONSES,
        **{f"{number} tests": measure(number) for number in (1, 10)},
    }
    text = json.dumps(report, indent=1)
    print(text)
    if output is not None:
        output.write_text(text + "\n")


if __name__ == "__main__":
    main()
