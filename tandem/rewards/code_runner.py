# SPDX-License-Identifier: Apache-2.0
"""The parent's side of programs with tests: interpreters of ``code_program`` that wait for jobs.

An interpreter is started once and forks for each job, which costs a tenth of a start. Jobs, answers
and errors travel in files without names, so that the process that forks sees none of them. An
interpreter that died is replaced, and its job is run once more.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from tandem.rewards.code_program import MESSAGE_BYTES, memory_file

_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
"""A program can read the environment that the interpreter was started with."""
_BOOTSTRAP = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from tandem.rewards.code_program import main; del sys.path[0]; main(int(sys.argv[2]))"
)
_ROOT = str(Path(__file__).parents[2])


class _RunnerLost(Exception):
    """The error of a job whose interpreter has ended."""


def run_job(job: Mapping[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """Run the job of ``code_program`` in a process of its own; return its answers.

    Threads may call it at the same time: each gets an interpreter of its own.

    Raises:
        RuntimeError: the job has not ended by itself, or not in time.
    """
    content = json.dumps(job).encode()
    try:
        return _run_in(_take(), content, timeout_s=timeout_s)
    except _RunnerLost:
        pass
    try:
        return _run_in(_Runner(), content, timeout_s=timeout_s)
    except _RunnerLost as error:
        raise RuntimeError("the runner of programs has ended") from error


def _run_in(runner: _Runner, content: bytes, *, timeout_s: float) -> list[dict[str, Any]]:
    try:
        answers = runner.run(content, timeout_s=timeout_s)
    except BaseException:
        runner.kill()
        raise
    _idle.append(runner)
    return answers


class _Runner:
    """An interpreter that runs one job at a time. It ends with the thread that has started it."""

    def __init__(self) -> None:
        self.owner = (os.getpid(), sys.executable)
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = ["-I", "-c", _BOOTSTRAP, _ROOT, str(theirs.fileno())]
        with theirs:
            # Not a session of its own: it belongs to the group that the pool kills.
            self._process = subprocess.Popen(
                [sys.executable, *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=_ENVIRONMENT,
                pass_fds=[theirs.fileno()],
            )

    def run(self, content: bytes, *, timeout_s: float) -> list[dict[str, Any]]:
        """Run a job; see ``run_job``. Raise _RunnerLost if this process has ended."""
        with ExitStack() as files:
            given, written, errors = (files.enter_context(memory_file()) for _ in range(3))
            given.write(content)
            given.seek(0)
            code = self._ask([given, written, errors], timeout_s=timeout_s)
            written.seek(0)
            answers = [json.loads(line) for line in written]
            if code:
                errors.seek(0)
                cause = errors.read().decode(errors="replace").strip().splitlines()[-1:]
                raise RuntimeError(f"the runner of programs ended with {code}: {cause}")
        return answers

    def kill(self) -> None:
        """End the process, and with it its job."""
        self._channel.close()
        self._process.kill()
        self._process.wait()

    def _ask(self, files: list[IO[bytes]], *, timeout_s: float) -> int:
        """Send a job, and return the exit code of its process."""
        self._channel.settimeout(timeout_s)
        try:
            socket.send_fds(self._channel, [b"job"], [file.fileno() for file in files])
            answer = self._channel.recv(MESSAGE_BYTES)
        except TimeoutError as error:
            raise RuntimeError("the runner of programs did not answer") from error
        except OSError as error:
            raise _RunnerLost from error
        if not answer:
            raise _RunnerLost
        return int(answer)


_idle: list[_Runner] = []


def _take() -> _Runner:
    """Return an interpreter that waits for jobs of this process, or a new one."""
    while _idle:
        runner = _idle.pop()
        if runner.owner == (os.getpid(), sys.executable):
            return runner
        if runner.owner[0] == os.getpid():
            runner.kill()
    return _Runner()
