# SPDX-License-Identifier: Apache-2.0
"""Processes of which a step of the engine hangs (V11): each ends, and says where it was."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.fakes.patience import LIMIT_S

PROGRAM = """
import ctypes
from tandem.rollout.step_watch import StepWatch

def spin():
    while True:
        sum(range(1000))

def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)

watch = StepWatch("vLLM", least_s=1.0, look_s=0.05, held_s={held_s})
with watch.watching():
    pass
watch._durations_s[0] = 0.0  # however long threads take to start here
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
    held_s = "60.0" if step == "spin" else "1.0"
    program = PROGRAM.replace("{step}", step).replace("{held_s}", held_s)
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert ended.returncode == code, ended.stderr
    assert said in ended.stderr
    assert f"in {step}" in ended.stderr, "the stack"
