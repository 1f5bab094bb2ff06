# SPDX-License-Identifier: Apache-2.0
"""A function in a child process: its end, its signals, and what it leaves behind.

All cases run in one process of their own, because a fork would copy the process of the tests.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SCRIPT = """
import json, os, signal, subprocess, sys, time
from dataclasses import asdict
import psutil
from tandem.runtime.child import run_in_child

def raises(send):
    raise RuntimeError("in the child")

def killed(send):
    send("so far")
    os.kill(os.getpid(), signal.SIGKILL)

def leaves_processes(send):
    orphans = "sleep 600 & sleep 600 & wait"
    left = subprocess.Popen(["sh", "-c", orphans], start_new_session=True)
    while len(psutil.Process(left.pid).children()) < 2:
        time.sleep(0.01)
    return 0

def is_interrupted(send):
    send("ready")
    try:
        os.kill(os.getppid(), signal.SIGINT)
        while True:  # an interrupt just before a sleep is seen when it ends
            time.sleep(0.1)
    except KeyboardInterrupt:
        return 7

def is_terminated(send):
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(600)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
CASES = [lambda send: 3, raises, killed, leaves_processes, is_interrupted, is_terminated]
mask = signal.pthread_sigmask(signal.SIG_BLOCK, [])
ends = []
for case in CASES:
    end = run_in_child(case)
    ends.append([end.code, end.killed_by, end.message, end.stopped_by])
    assert not psutil.Process().children(recursive=True), case
assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == mask
print(json.dumps(ends))
"""
TIMEOUT_S = 300.0
NAMES = ["exits", "raises", "killed", "leaves processes", "is interrupted", "is terminated"]
EXPECTED = [
    [3, None, "", None],
    [1, None, "", None],
    [137, 9, "so far", None],
    [0, None, "", None],
    [7, None, "ready", 2],
    [143, 15, "", 15],
]


@pytest.fixture(scope="module")
def ends() -> dict[str, list[object]]:
    """The end of each case by its name."""
    words = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("Traceback") == 1, "the error of the child is shown"
    return dict(zip(NAMES, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize(("name", "expected"), list(zip(NAMES, EXPECTED, strict=True)), ids=NAMES)
def test_end_of_a_child(name: str, expected: list[object], ends: dict[str, list[object]]) -> None:
    assert ends[name] == expected
