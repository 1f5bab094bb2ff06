# SPDX-License-Identifier: Apache-2.0
"""``tandem`` commands as real processes, for tests that stop, starve or read them.

Each process is forked from one that has imported torch already, so that it starts in a few
hundredths of a second; what it runs is ``tandem.cli.main`` and nothing else. So are the workers of
Ray (``tests/fakes/forking``), unless the command has conditions: then it has fresh workers, which
find the same conditions.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

from tandem.cli.main import main
from tests.fakes.forking.server import Forking, start_forking
from tests.fakes.hosts import enter_host
from tests.fakes.preloading import extend_path, with_preloaded

PRELOADED = (
    "tandem.cli.train",
    "tandem.driver.train",
    "tandem.cli.plan_here",
    "tandem.cli.sft",
    "tandem.driver.sft",
    "tandem.cli.export",
    "tandem.cli.sample_here",
    "tandem.cli.report",
    "torch._dynamo",  # which torch loads for more than a second when layers are computed again
)
TIMEOUT_S = 600  # for a program that never ends; a busy machine may take minutes
SLOW_S = 0.3
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_NAMES_CHANGED = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


@dataclass(frozen=True)
class Conditions:
    """What a command finds itself in.

    Attributes:
        environment: variables besides those of the tests.
        max_file_bytes: no file can grow beyond it, as on a full disk; None: any.
        die_at: the command kills itself (SIGKILL) before this file operation, counted from 1.
        own_session: it leads a process group of its own, which can be signalled.
        slow_paths: opening a file whose path has this text takes ``SLOW_S``; "": none.
        host: the network namespace that it runs in; "": that of the tests.
        forked_workers: Ray's workers are forked all the same. They find the variables, except those
            that are read when torch is imported, and modules below ``PYTHONPATH``.
    """

    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    max_file_bytes: int | None = None
    die_at: int | None = None
    own_session: bool = False
    slow_paths: str = ""
    host: str = ""
    forked_workers: bool = False


@dataclass(frozen=True)
class Ended:
    """``code`` is negative for the signal that killed the command."""

    code: int
    stdout: str
    stderr: str

    @property
    def errors(self) -> list[str]:
        """The lines on stderr that say an error."""
        return [line for line in self.stderr.splitlines() if line.startswith("error:")]


Program = Callable[[list[str]], int]


class Command:
    """A running command. ``folder`` becomes its working directory and holds its output."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        folder: Path,
        conditions: Conditions | None = None,
        program: Program = main,
    ) -> None:
        """Start it.

        Args:
            program: what takes the arguments and returns the exit code.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = (folder / "stdout.txt", folder / "stderr.txt")
        for path in self._outputs:  # an earlier command's, or of one that is killed before it opens
            path.write_text("")
        conditions = conditions or Conditions(forked_workers=True)
        self._process: ForkServerProcess = _server().Process(
            target=_run,
            args=(
                partial(program, list(arguments)),
                str(folder),
                conditions,
                start_forking() if conditions.forked_workers else None,
            ),
        )
        self._process.start()

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None, "it was started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal, if it is still there."""
        if self._process.is_alive():
            os.kill(self.pid, number)

    def wait(self, timeout_s: float = TIMEOUT_S) -> Ended:
        """Wait for the end; a command that hangs is killed and fails the test."""
        self._process.join(timeout_s)
        if self._process.exitcode is None:
            self._process.kill()
            raise AssertionError(f"still running after {timeout_s} s:\n{self.output()}")
        stdout, stderr = (path.read_text() for path in self._outputs)
        return Ended(self._process.exitcode, stdout, stderr)

    def wait_for(self, path: Path, *, text: str = "") -> None:
        """Wait until a file holds ``text``; a command that ends before that fails the test."""

        def is_there() -> bool:
            return path.exists() and text in path.read_text()

        deadline = time.monotonic() + TIMEOUT_S
        while not is_there():
            has_ended = not self.is_running
            if (has_ended and not is_there()) or time.monotonic() > deadline:
                when = "when it ended" if has_ended else f"after {TIMEOUT_S} s"
                raise AssertionError(f"no {text!r} in {path} {when}:\n{self.output()}")
            time.sleep(0.005)

    def output(self) -> str:
        """What it has written so far."""
        return "".join(path.read_text() for path in self._outputs if path.exists())


def run_command(
    arguments: Sequence[str],
    *,
    folder: Path,
    conditions: Conditions | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Ended:
    """Run ``tandem`` with ``arguments`` to its end."""
    return Command(arguments, folder=folder, conditions=conditions).wait(timeout_s)


def check_refusal(ended: Ended, *parts: str) -> None:
    """Exit code 2 and exactly one line of error, which has all the parts."""
    assert ended.code == 2, ended.stderr
    assert "Traceback" not in ended.stderr
    (error,) = ended.errors
    assert ended.stderr.splitlines()[-1] == error
    for part in parts:
        assert part in error


def start_server() -> None:
    """Start the process that commands are forked from. Its environment is the one of this moment,
    or of the first command before it."""
    _server()
    forkserver.ensure_running()


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(with_preloaded(PRELOADED))
    return context


def _run(
    body: Callable[[], int], folder: str, conditions: Conditions, forking: Forking | None
) -> None:
    """The child's whole life."""
    os.chdir(folder)
    if forking is not None:
        sys.executable = forking.executable
        os.environ.update(forking.environment)
    if conditions.host:
        enter_host(conditions.host)
    if conditions.own_session:
        os.setsid()
    os.environ.update(conditions.environment)
    extend_path(conditions.environment)
    for descriptor, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, descriptor)
        os.close(file)
    if conditions.max_file_bytes is not None:
        limit = conditions.max_file_bytes
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if conditions.die_at is not None:
        _die_at(conditions.die_at)
    if conditions.slow_paths:
        _slow_down(conditions.slow_paths)
    sys.exit(body())


def _die_at(operation: int) -> None:
    numbers = count(1)

    def watch(event: str, values: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(values[2], int) and values[2] & _WRITING
        if (writes or event in _NAMES_CHANGED) and next(numbers) == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _slow_down(text: str) -> None:
    def watch(event: str, values: tuple[Any, ...]) -> None:
        if event == "open" and text in str(values[0]):
            time.sleep(SLOW_S)

    sys.addaudithook(watch)
