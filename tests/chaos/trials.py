# SPDX-License-Identifier: Apache-2.0
"""A trial of the chaos job: a run whose processes are killed at random moments, started again until
it ends, and compared with a run that nobody disturbed.
"""

from __future__ import annotations

import json
import random
import re
import signal
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from tandem.checkpoint.manifest import find_damage
from tests.chaos.modes import DUMPS, NUM_STEPS, SAMPLES, Mode
from tests.chaos.processes import MARK, processes_with
from tests.fakes.commands import Command, Conditions
from tests.fakes.tiny_run import metrics_of

MAX_CAUSE_S = 10.0
"""The longest time from a death to the line that names it."""
HANG_S = 600.0
"""A run that has not ended by then hangs. An undisturbed one takes seconds, on a busy machine a
minute or two."""
MAX_DELAY_S = 0.5
"""The longest time from the line of a step to the kill."""
_END_S = 30.0
_STEP = re.compile(rf"\bstep (\d+)/{NUM_STEPS}\b")
_POLL_S = 0.02
HARD_SHARE = 0.7
"""The share of signals that are SIGKILL. The others are SIGTERM or SIGINT."""
_PROGRAMS = {
    "reward": "tandem.rewards.worker",
    "tool": "tandem.agents.worker",
    "gcs": "gcs_server",
}


@dataclass(frozen=True)
class Kill:
    """A signal to a process of a run, and what followed.

    Attributes:
        after_s: the seconds from the start of the command.
        code: its exit code.
        cause: its line of error, if there is one.
        cause_s: the seconds from the signal to that line.
    """

    kind: str
    signal: str
    after_s: float
    code: int | None
    cause: str = ""
    cause_s: float | None = None


@dataclass
class Trial:
    """What a trial has found. ``problems`` has a sentence for each thing that went wrong."""

    mode: str
    kills: list[Kill] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    num_starts: int = 0

    def note(self, kind: str, text: str) -> None:
        """Add a problem of a kind."""
        self.problems.setdefault(kind, []).append(f"{self.mode}: {text}")


@dataclass(frozen=True)
class Outcome:
    """What an undisturbed run leaves: its prompts and the bytes of its final weights."""

    prompts: Counter[str]
    weights: dict[str, bytes]


class Attempt:
    """One start of a run, whose processes can be found and killed."""

    def __init__(self, arguments: list[str], *, folder: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.begin_s = time.monotonic()
        self.stdout, self.stderr = folder / "stdout.txt", folder / "stderr.txt"
        folder.mkdir(parents=True, exist_ok=True)
        for path in (self.stdout, self.stderr):  # a command may be killed before it opens them
            path.write_text("")
        conditions = Conditions(environment={MARK: self.mark})
        self.command = Command(arguments, folder=folder, conditions=conditions)
        self._seen: dict[int, psutil.Process] = {}

    @property
    def is_late(self) -> bool:
        """Whether the run should have ended by now."""
        return time.monotonic() - self.begin_s > HANG_S

    def has_reached(self, step: int) -> bool:
        """Return whether a line tells of this step or a later one."""
        told = [int(number) for number in _STEP.findall(self.stdout.read_text())]
        return max(told, default=0) >= step

    def find(self, kind: str, run: Path) -> psutil.Process | None:
        """Return a process of a kind, if the run has one now."""
        with suppress(psutil.NoSuchProcess):
            driver = psutil.Process(self.command.pid)
            below = driver.children(recursive=True)
            self._seen |= {process.pid: process for process in below}
            if kind == "driver":
                return driver
            return next((one for one in below if _is_kind(one, kind, run=run)), None)
        return None

    def strike(
        self, kinds: Sequence[str], *, run: Path, number: signal.Signals
    ) -> tuple[str, float] | None:
        """Signal a process of the first of these kinds that the run has now.

        Returns:
            the kind, and the seconds since the start; None if the run has ended.
        """
        for kind in kinds:
            victim = self.find(kind, run)
            with suppress(psutil.NoSuchProcess):
                if victim is not None and self.command.is_running:
                    victim.send_signal(number)
                    return kind, time.monotonic() - self.begin_s
        return None

    def wait(self, trial: Trial) -> int | None:
        """Return the exit code; None, and a problem, if the run hangs."""
        while self.command.is_running:
            if self.is_late:
                trial.note("hangs", f"no end after {HANG_S:g} s: {self._last_lines()}")
                self.command.signal(signal.SIGKILL)
                self.command.wait()
                return None
            time.sleep(_POLL_S)
        return self.command.wait().code

    def wait_for_cause(self, since_s: float) -> tuple[str, float | None]:
        """Return the first line of error and the seconds after which it was there."""
        while True:
            is_over = not self.command.is_running
            text = self.stderr.read_text() if self.stderr.exists() else ""
            line = next((one for one in text.splitlines() if one.startswith("error:")), "")
            if line:
                return line, time.monotonic() - since_s
            if is_over or self.is_late:
                return "", None
            time.sleep(_POLL_S)

    def check_end(self, trial: Trial) -> None:
        """Note the processes that are left, and end them."""
        deadline = time.monotonic() + _END_S
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                trial.note("processes_left", f"{process.pid} {' '.join(process.cmdline())[:100]}")
                process.kill()

    def _left(self) -> list[psutil.Process]:
        seen = [one for one in self._seen.values() if one.is_running()]
        marked = [one for one in processes_with(self.mark) if one not in seen]
        return [one for one in (*seen, *marked) if _is_alive(one)]

    def output(self) -> str:
        """Return what the command has written."""
        return self.command.output()

    def _last_lines(self) -> str:
        return " | ".join(self.command.output().splitlines()[-3:])


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_kind(process: psutil.Process, kind: str, *, run: Path) -> bool:
    if kind in ("trainer", "rollout"):
        return process.pid in _workers(run, kind)
    if kind == "raylet":
        return process.name() == "raylet"
    return any(_PROGRAMS[kind] in word for word in process.cmdline())


def _workers(run: Path, kind: str) -> list[int]:
    """Return the workers of the newest start that train, or that only generate."""
    try:
        places = json.loads((run / "placement.json").read_text())
    except (OSError, ValueError):
        return []
    trains = kind == "trainer"
    return [place["pid"] for place in places if ("actor-train" in place["tasks"]) is trains]


def disturb(
    trial: Trial,
    mode: Mode,
    *,
    arguments: list[str],
    folder: Path,
    draw: random.Random,
) -> bool:
    """Start the run, kill one of its processes, check its end, and return whether it has finished.

    The moment is soon after a step that is drawn at random, or before the first one.
    """
    kinds, run = draw.sample(mode.kinds, len(mode.kinds)), folder / "run"
    step, delay_s = draw.randrange(NUM_STEPS), draw.uniform(0, MAX_DELAY_S)
    (run / "placement.json").unlink(missing_ok=True)
    attempt = Attempt(arguments, folder=folder / f"start-{trial.num_starts}")
    trial.num_starts += 1
    soft = draw.choice((signal.SIGTERM, signal.SIGINT))
    number = signal.SIGKILL if draw.random() < HARD_SHARE else soft
    while attempt.command.is_running and not (attempt.has_reached(step) or attempt.is_late):
        time.sleep(_POLL_S)
    time.sleep(delay_s)
    struck = attempt.strike(kinds, run=run, number=number)
    cause, cause_s = attempt.wait_for_cause(time.monotonic()) if struck else ("", None)
    code = attempt.wait(trial)
    if struck is not None:
        kind, after_s = struck
        kill = Kill(kind, number.name, round(after_s, 2), code, cause, cause_s)
        trial.kills.append(kill)
        check_cause(trial, kill)
    elif code not in (0, None):
        trial.note("failed", f"exit code {code} without a kill: {attempt.output()[-300:]}")
    attempt.check_end(trial)
    check_checkpoints(trial, run)
    return code == 0 and newest_step(run) == NUM_STEPS


def check_cause(trial: Trial, kill: Kill) -> None:
    """Note a death that a run has not named in time; a signal to the driver is an order."""
    number = signal.Signals[kill.signal]
    if kill.kind == "driver":
        if kill.code not in (0, -number, 128 + number):
            trial.note("unnamed", f"{kill}")
        return
    if kill.code == 0:
        return
    if not kill.cause:
        trial.note("unnamed", f"{kill}")
    elif kill.cause_s is not None and kill.cause_s > MAX_CAUSE_S:
        trial.note("late", f"{kill}")


def check_checkpoints(trial: Trial, run: Path) -> None:
    """Note every checkpoint that a loader would take and that is not whole."""
    for folder in run.glob("global_step_*"):
        damage = find_damage(folder)
        if damage is None or damage:
            trial.note("torn_checkpoints", f"{folder.name}: {damage or 'no manifest'}")


def newest_step(run: Path) -> int:
    """Return the step of the newest checkpoint, 0 without one."""
    file = run / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def outcome_of(run: Path) -> Outcome:
    """Return what a finished run has left."""
    prompts: Counter[str] = Counter()
    for step in range(1, NUM_STEPS + 1):
        for line in (run / DUMPS / f"{step}.jsonl").read_text().splitlines():
            row = json.loads(line)
            prompts[json.dumps([row["input"], row["gts"]])] += 1
    last = run / f"global_step_{NUM_STEPS}"
    kept = [path for path in sorted(last.rglob("*")) if path.suffix in (".safetensors", ".distcp")]
    return Outcome(prompts, {path.name: path.read_bytes() for path in kept})


def compare(trial: Trial, mode: Mode, *, run: Path, whole: Outcome) -> None:
    """Note where a finished run differs from the undisturbed one."""
    ours = outcome_of(run)
    for kind, difference in (
        ("prompts_lost", whole.prompts - ours.prompts),
        ("prompts_doubled", ours.prompts - whole.prompts),
    ):
        if difference:
            trial.note(kind, f"{sum(difference.values())} samples of {SAMPLES} a prompt")
    try:
        steps = sorted(metrics_of(run))
    except AssertionError as error:
        trial.note("rows_doubled", str(error))
    else:
        if steps != list(range(1, NUM_STEPS + 1)):
            trial.note("rows_lost", f"steps {steps}")
    if mode.is_repeatable and ours.weights != whole.weights:
        trial.note(
            "weights_different", f"after {[(k.kind, k.signal, k.after_s) for k in trial.kills]}"
        )
