# SPDX-License-Identifier: Apache-2.0
"""What is left of SGLang's files when its process is killed, and a process that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.api import EngineDied
from tandem.rollout.sglang import client
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


def test_a_process_that_reads_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "START_S", 0.3)
    stopped = tmp_path / "python"
    stopped.write_text("#!/bin/sh\nexec sleep 60\n")
    stopped.chmod(0o755)
    memory_fd = os.memfd_create("weights")
    first = {"more than a socket holds": "x" * (1 << 23)}
    with pytest.raises(EngineDied, match="SGLang made no progress for 0 s and was killed"):
        client.SglangProcess(
            str(stopped), first=first, memory_fd=memory_fd, on_cpu=True, stall_s=0.3
        )
    os.close(memory_fd)
