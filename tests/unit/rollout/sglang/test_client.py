# SPDX-License-Identifier: Apache-2.0
"""What is left of SGLang's files when the process that holds an engine is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fakes.patience import PATIENCE_S

PROGRAM = """
import os, signal, sys
from tandem.rollout.sglang.client import Cleaner
cleaner = Cleaner(sys.argv[2:])
if sys.argv[1] == "dismissed":
    cleaner.dismiss()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("state", ["kept", "dismissed"])
def test_files_are_removed_unless_the_engine_was_closed(tmp_path: Path, state: str) -> None:
    folder, log = tmp_path / "a folder", tmp_path / "-log"
    folder.mkdir()
    for file in (folder / "socket", log):
        file.touch()
    command = [sys.executable, "-c", PROGRAM, state, str(folder), str(log)]
    ended = subprocess.run(command, check=False, capture_output=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    if state == "dismissed":
        time.sleep(0.2)
        assert folder.exists() and log.exists()
        return
    deadline = time.monotonic() + PATIENCE_S
    while folder.exists() or log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
