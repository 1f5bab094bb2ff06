# SPDX-License-Identifier: Apache-2.0
"""What the chaos job does to a run: signals, full disks and lost nodes, and what must follow.

A process is killed, paused (SIGSTOP and soon SIGCONT) or stopped for good. The disk of the run's
folder is filled. The cable between two hosts is pulled.
"""

from __future__ import annotations

import random
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.chaos.attempts import Attempt
from tests.chaos.modes import ANSWER_S, MEETING_S, TIMEOUT_S, Mode
from tests.fakes.hosts import Hosts

MAX_CAUSE_S = 10.0
"""The longest time from a death to the line that names it."""
NETWORK_SILENCE_S = 10.0
"""The silence after which a host counts as lost; Ray's own checks take as long."""
MAX_PAUSE_S = 2.5
_KINDS_THAT_STOP = ("reward", "tool", "trainer", "rollout")
"""The kinds that something watches. A stopped driver, or a stopped process of Ray, just waits."""


@dataclass(frozen=True)
class Plan:
    """A disturbance that was drawn.

    Attributes:
        action: the name of a signal, ``pause``, ``stop``, ``full disk`` or ``lost node``.
        kinds: the kinds of processes, of which the first that the run has is disturbed.
        step, delay_s: the moment, in seconds after the line of a step; step 0 is the start.
        pause_s: the length of a pause.
        choice: which process of a kind, between 0 and 1.
    """

    action: str
    kinds: tuple[str, ...]
    step: int
    delay_s: float
    pause_s: float
    choice: float


@dataclass(frozen=True)
class Disturbance:
    """What was done to a run, and what followed.

    Attributes:
        action: see ``Plan``.
        after_s: the seconds from the start of the command.
        code: the exit code of the driver.
        cause: the line of error, if there is one.
        cause_s: the seconds from the disturbance to that line.
        pid: the process; 0 without one.
        is_formed: whether the processes of the run had found each other.
        is_replaceable: whether another process takes the place of this one.
    """

    kind: str
    action: str
    after_s: float
    code: int | None = None
    cause: str = ""
    cause_s: float | None = None
    pid: int = 0
    is_formed: bool = True
    is_replaceable: bool = False

    @property
    def limit_s(self) -> float:
        """The longest time to the line: 10 s, after the silence that a stop or a cut must last."""
        if self.kind in ("member", "cable") and not self.is_formed:  # a host is awaited
            return MAX_CAUSE_S + MEETING_S
        if self.action == "stop":
            return MAX_CAUSE_S + TIMEOUT_S / 2
        return MAX_CAUSE_S + (NETWORK_SILENCE_S if self.action == "lost node" else 0.0)

    def find_problem(self) -> str:
        """Return the kind of problem that the end of the run shows; "" if it is right."""
        if self.code == 0:
            return ""
        if self.action == "pause" or self.is_replaceable:
            return "failed"
        if self.action == "full disk":
            return "" if self.code == 2 and "space" in self.cause else "unnamed"
        if self.kind == "driver":  # a signal to the driver is an order
            number = signal.Signals[self.action]
            return "" if self.code in (-number, 128 + number) else "unnamed"
        # The line of a member that never came names its NODE_RANK.
        named = {"trainer": f"pid {self.pid}", "rollout": f"pid {self.pid}", "member": "node 1"}
        cause = self.cause.replace("NODE_RANK", "node")
        if not cause or named.get(self.kind, "") not in cause:
            return "unnamed"
        return "late" if self.cause_s is None or self.cause_s > self.limit_s else ""


class SmallDisk:
    """A file system of its own for the folder of a run, which can be filled."""

    def __init__(self, folder: Path, *, size: str = "64m") -> None:
        folder.mkdir(parents=True)
        self._folder, self._ballast = folder, folder / ".ballast"
        mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        subprocess.run(mount, check=True, capture_output=True)

    def fill(self) -> None:
        """Leave no room."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)

    def close(self) -> None:
        """Take the file system, with all that is on it, away, even if a process still uses it."""
        subprocess.run(["umount", "--lazy", str(self._folder)], check=True, capture_output=True)


def may_mount(folder: Path) -> bool:
    """Return whether this process may make file systems."""
    try:
        SmallDisk(folder).close()
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        folder.rmdir()
    return True


def draw_plan(mode: Mode, draw: random.Random, *, steps: int, has_disk: bool) -> Plan:
    """Draw a disturbance of a run of a mode, which has ``steps`` steps."""
    kinds = tuple(draw.sample(mode.kinds, len(mode.kinds)))
    step = draw.randrange(steps)
    delay_s = draw.uniform(0, 0.6 if step else 4.0)
    pause_s, choice = draw.uniform(0.2, MAX_PAUSE_S), draw.random()
    soft = draw.choice(("SIGTERM", "SIGINT"))
    action = draw.choices(
        ("SIGKILL", soft, "pause", "stop", "full disk", "lost node"),
        (45, 10, 12, 10, 8 if has_disk else 0, 20 if mode.num_nodes > 1 else 0),
    )[0]
    if action == "stop":
        kinds = tuple(kind for kind in kinds if kind in _KINDS_THAT_STOP)
    return Plan(action, kinds, step, delay_s, pause_s, choice)


def disturb(
    attempt: Attempt,
    plan: Plan,
    *,
    run: Path,
    disk: SmallDisk | None,
    hosts: Hosts | None,
    replaces: bool = False,
) -> Disturbance | None:
    """Carry out a plan; return None if the run has ended before.

    Args:
        replaces: whether workers that only generate are replaced.
    """
    if not attempt.is_running:
        return None
    after_s = round(time.monotonic() - attempt.begin_s, 2)
    is_formed = (run / "placement.json").exists()
    if plan.action == "full disk" and disk is not None:
        disk.fill()
        return Disturbance("disk", plan.action, after_s)
    if plan.action == "lost node" and hosts is not None:
        hosts.cut()
        return Disturbance("cable", plan.action, after_s, is_formed=is_formed)
    for kind in plan.kinds:
        found = attempt.find(kind, run)
        if not found or not attempt.is_running:
            continue
        victim = found[int(plan.choice * len(found))]
        with suppress(psutil.NoSuchProcess):
            _signal(victim, plan)
            return Disturbance(
                kind,
                plan.action,
                after_s,
                pid=victim.pid,
                is_formed=is_formed,
                is_replaceable=replaces and kind == "rollout",
            )
    return None


def _signal(victim: psutil.Process, plan: Plan) -> None:
    if plan.action not in ("pause", "stop"):
        victim.send_signal(signal.Signals[plan.action])
        return
    victim.suspend()
    if plan.action == "pause":
        time.sleep(plan.pause_s)
        with suppress(psutil.NoSuchProcess):
            victim.resume()


def describe_limits() -> dict[str, float]:
    """Return the times within which a report expects that a run names what has happened."""
    return {
        "killed": MAX_CAUSE_S,
        "stopped worker": MAX_CAUSE_S + TIMEOUT_S / 2,
        "lost node": MAX_CAUSE_S + NETWORK_SILENCE_S,
        "node that never came": MAX_CAUSE_S + MEETING_S,
        "stopped reward or tool, after which its work is done again": float(ANSWER_S),
    }
