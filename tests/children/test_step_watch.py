# SPDX-License-Identifier: Apache-2.0
"""Processes of which a step of the engine hangs (V11): each ends, and says where it was."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.fakes.patience import PATIENCE_S

PROGRAM = """
import ctypes
from tandem.rollout.step_watch import StepWatch

def spin():
    while True:
        sum(range(1000))

def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)

watch = StepWatch("vLLM", least_s=1.0, look_s=0.05, held_s=1.0)
with watch.watching():
    pass
with watch.watching():
    {step}()
"""


@pytest.mark.parametrize(
    ("step", "code", "said"),
    [
        ("spin", -signal.SIGKILL, "error: vLLM: a step has not returned for 1 s\n"),
        ("hold_the_interpreter", 1, "Timeout (0:00:02)!"),
    ],
)
def test_v11_a_step_that_hangs_ends_the_process_with_its_stack(
    step: str, code: int, said: str
) -> None:
    command = [sys.executable, "-c", PROGRAM.replace("{step}", step)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert f"in {step}" in ended.stderr, "the stack"
