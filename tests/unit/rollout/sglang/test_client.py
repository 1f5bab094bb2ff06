# SPDX-License-Identifier: Apache-2.0
"""What is left of SGLang's files when its process is killed, and a process that stands still."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tandem.api import EngineDied
from tandem.rollout.sglang import client
from tandem.runtime.liveness import CallMonitor
from tests.fakes.patience import PATIENCE_S, until

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


def silent_interpreter(folder: Path) -> str:
    """Write a program that neither reads nor writes in place of SGLang's interpreter."""
    program = folder / "python"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    return str(program)


def test_a_process_that_reads_nothing_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "START_S", 0.3)
    memory_fd = os.memfd_create("weights")
    first = {"more than a socket holds": "x" * (1 << 23)}
    with pytest.raises(EngineDied, match="SGLang made no progress for 0 s and was killed"):
        client.SglangProcess(
            silent_interpreter(tmp_path), first=first, memory_fd=memory_fd, on_cpu=True, stall_s=0.3
        )
    os.close(memory_fd)


def test_a_process_that_ends_is_named_with_the_last_error_of_its_log(tmp_path: Path) -> None:
    """A value that only SGLang refuses, such as a wrong ``attention_backend``."""
    program = tmp_path / "python"
    said = r"ValueError: one\n  File x\nValueError: no backend\n\n[12:00] It failed.\n"
    program.write_text(f"#!/bin/sh\nprintf '{said}'\nkill -9 $$\n")
    program.chmod(0o755)
    memory_fd = os.memfd_create("weights")
    with pytest.raises(EngineDied) as caught:
        client.SglangProcess(str(program), first={}, memory_fd=memory_fd, on_cpu=True)
    os.close(memory_fd)
    message, _, log = str(caught.value).partition("; its output is in ")
    assert message == "SGLang: process killed by SIGKILL; its last error: ValueError: no backend"
    Path(log).unlink()


def test_a_worker_that_waits_for_sglang_is_not_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers hang whose call uses no processor time, and SGLang has a limit of its own."""
    monkeypatch.setattr(client, "_AWAKE_S", 0.05)
    interpreter = silent_interpreter(tmp_path)
    monitor, memory_fd = CallMonitor(), os.memfd_create("weights")

    def start() -> None:
        with monitor.running(), suppress(EngineDied):
            client.SglangProcess(interpreter, first={}, memory_fd=memory_fd, on_cpu=True)

    thread = threading.Thread(target=start)
    thread.start()
    waiting = until(lambda: _waiting(monitor))
    assert until(lambda: (_waiting(monitor) or 0.0) > waiting), "it computes a little"
    children = psutil.Process().children
    until(lambda: [child for child in children() if child.name() == "sleep"])[0].kill()
    thread.join()
    os.close(memory_fd)


def _waiting(monitor: CallMonitor) -> float | None:
    """Return the processor time of a thread that waits for SGLang."""
    heartbeat = monitor.heartbeat()
    return heartbeat.cpu_s if "_is_readable" in heartbeat.stack else None
