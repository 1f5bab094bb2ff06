# SPDX-License-Identifier: Apache-2.0
"""A start of a run, whose processes can be found and disturbed, on one host or on two."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from tests.chaos.modes import NUM_STEPS
from tests.chaos.processes import MARK, processes_with
from tests.fakes.commands import Command, Conditions
from tests.fakes.hosts import Hosts

HANG_S = 600.0
"""The least time after which a run that has not ended hangs. An undisturbed one takes seconds, on a
busy machine a minute or two."""
HANG_FACTOR = 5.0
"""A run whose processes are started again takes a few times as long as an undisturbed one. On a
very busy machine that is more than ``HANG_S``."""
POLL_S = 0.02
_END_S = 30.0
_STEP = re.compile(rf"\bstep (\d+)/{NUM_STEPS}\b")
_PROGRAMS = {
    "reward": "tandem.rewards.worker",
    "tool": "tandem.agents.worker",
    "gcs": "gcs_server",
    "engine": "sglang::scheduler",
}


class Attempt:
    """One start of a run, with a command on each of its hosts; the first one drives.

    Args:
        hang_s: the time after which it hangs if it has not ended.
    """

    def __init__(
        self,
        arguments: list[str],
        *,
        folder: Path,
        hosts: Hosts | None = None,
        hang_s: float = HANG_S,
    ) -> None:
        self.hang_s = hang_s
        self.mark = uuid.uuid4().hex
        self.begin_s = time.monotonic()
        self.stdout, self.stderr = folder / "stdout.txt", folder / "stderr.txt"
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.stdout, self.stderr):  # a command may be killed before it opens them
            path.write_text("")
        marked = {MARK: self.mark}
        if hosts is None:
            conditions = [Conditions(environment=marked)]
        else:
            conditions = [
                Conditions(environment=marked | hosts.launch_variables(rank), host=name)
                for rank, name in enumerate(hosts.names)
            ]
        folders = [folder, *(folder / f"member-{rank}" for rank in range(1, len(conditions)))]
        self._commands = [
            Command(arguments, folder=place, conditions=each)
            for place, each in zip(folders, conditions, strict=True)
        ]
        self.command = self._commands[0]
        self._seen: dict[int, psutil.Process] = {}

    @property
    def is_late(self) -> bool:
        """Whether the run should have ended by now."""
        return time.monotonic() - self.begin_s > self.hang_s

    @property
    def is_running(self) -> bool:
        """Whether its driver has not ended."""
        return self.command.is_running

    def has_reached(self, step: int) -> bool:
        """Return whether a line tells of this step or a later one."""
        told = [int(number) for number in _STEP.findall(self.stdout.read_text())]
        return max(told, default=0) >= step

    def find(self, kind: str, run: Path) -> list[psutil.Process]:
        """Return the processes of a kind that the run has now."""
        roots: list[psutil.Process] = []
        for command in self._commands:
            with suppress(psutil.NoSuchProcess):
                roots.append(psutil.Process(command.pid))
        if kind in ("driver", "member"):
            wanted = self._commands[:1] if kind == "driver" else self._commands[1:]
            pids = [command.pid for command in wanted]
            return [root for root in roots if root.pid in pids and _is_command(root)]
        below: list[psutil.Process] = []
        for root in roots:
            with suppress(psutil.NoSuchProcess):
                below += root.children(recursive=True)
        self._seen |= {process.pid: process for process in below}
        return [one for one in below if _is_kind(one, kind, run=run)]

    def wait(self) -> int | None:
        """Return the exit code of the driver; None if a command of the run hangs."""
        while any(command.is_running for command in self._commands):
            if self.is_late:
                for command in self._commands:
                    command.signal(signal.SIGKILL)
                    command.wait()
                return None
            time.sleep(POLL_S)
        return self.command.wait().code

    def wait_for_cause(self, since_s: float) -> tuple[str, float | None]:
        """Return the first line of error and the seconds after which it was there."""
        while True:
            is_over = not self.is_running
            text = self.stderr.read_text() if self.stderr.exists() else ""
            line = next((one for one in text.splitlines() if one.startswith("error:")), "")
            if line:
                return line, time.monotonic() - since_s
            if is_over or self.is_late:
                return "", None
            time.sleep(POLL_S)

    def end_processes(self) -> list[str]:
        """Wait until no process is left; end those that stay, and return their commands."""
        deadline = time.monotonic() + _END_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        commands: list[str] = []
        for process in left:
            with suppress(psutil.NoSuchProcess):
                commands.append(f"{process.pid} {' '.join(process.cmdline())[:100]}")
                process.kill()
        return commands

    def _left(self) -> list[psutil.Process]:
        seen = [one for one in self._seen.values() if one.is_running()]
        marked = [one for one in processes_with(self.mark) if one not in seen]
        return [one for one in (*seen, *marked) if is_alive(one)]

    def output(self) -> str:
        """Return what the commands have written."""
        return "".join(command.output() for command in self._commands)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process has not ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_command(process: psutil.Process) -> bool:
    """Return whether a process runs the command, and not yet the code of the tests before it."""
    try:
        output = os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return False
    return output.endswith("/stdout.txt") and is_alive(process)


def _is_kind(process: psutil.Process, kind: str, *, run: Path) -> bool:
    try:
        if kind in ("trainer", "rollout"):
            return process.pid in _workers(run, kind) and is_alive(process)
        if kind == "raylet":
            return process.name() == "raylet"
        return any(_PROGRAMS[kind] in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False


def _workers(run: Path, kind: str) -> list[int]:
    """Return the workers of the newest start that train, or that only generate."""
    try:
        places = json.loads((run / "placement.json").read_text())
    except (OSError, ValueError):
        return []
    trains = kind == "trainer"
    return [place["pid"] for place in places if ("actor-train" in place["tasks"]) is trains]
