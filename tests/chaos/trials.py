# SPDX-License-Identifier: Apache-2.0
"""A trial of the chaos job: a run that is disturbed at random moments, started again until it ends,
and compared with a run that nobody disturbed.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tandem.checkpoint.manifest import find_damage
from tests.chaos.attempts import HANG_FACTOR, HANG_S, POLL_S, Attempt
from tests.chaos.disturbances import Disturbance, SmallDisk, disturb, draw_plan
from tests.chaos.modes import DUMPS, NUM_STEPS, SAMPLES, Mode
from tests.fakes.hosts import Hosts
from tests.fakes.tiny_run import metrics_of


@dataclass
class Trial:
    """What a trial has found. ``problems`` has a sentence for each thing that went wrong."""

    mode: str
    disturbances: list[Disturbance] = field(default_factory=list)
    problems: dict[str, list[str]] = field(default_factory=dict)
    num_starts: int = 0
    num_resumes: int = 0
    num_replaced: int = 0
    has_compared_weights: bool = False

    def note(self, kind: str, text: str) -> None:
        """Add a problem of a kind."""
        self.problems.setdefault(kind, []).append(f"{self.mode}: {text}")


@dataclass(frozen=True)
class Outcome:
    """What an undisturbed run leaves: its prompts and the bytes of its final weights.

    ``seconds`` is the time that it took.
    """

    prompts: Counter[str]
    weights: dict[str, bytes]
    seconds: float = 0.0


@dataclass(frozen=True)
class Scene:
    """Where the run of a trial takes place.

    Attributes:
        run: the folder of the run.
        outputs: the folder for what its commands print.
        disk: the file system of ``run``, if it has one of its own.
        hosts: the hosts of a run of two nodes.
        whole_s: the seconds that a run takes which nobody disturbs.
    """

    mode: Mode
    arguments: list[str]
    run: Path
    outputs: Path
    disk: SmallDisk | None = None
    hosts: Hosts | None = None
    whole_s: float = 0.0

    def start(self, number: int) -> Attempt:
        """Start the command of the run on each of its hosts."""
        if self.disk is not None:
            self.disk.free()
        if self.hosts is not None:
            self.hosts.connect()
        (self.run / "placement.json").unlink(missing_ok=True)
        folder = self.outputs / f"start-{number}"
        hang_s = max(HANG_S, HANG_FACTOR * self.whole_s)
        return Attempt(self.arguments, folder=folder, hosts=self.hosts, hang_s=hang_s)


def try_start(trial: Trial, scene: Scene, *, draw: random.Random | None = None) -> bool:
    """Start the run, disturb it, check its end, and return whether it has finished.

    Args:
        draw: draws what happens and when; None: nothing happens.
    """
    attempt = scene.start(trial.num_starts)
    trial.num_starts += 1
    made = None if draw is None else _disturb_in_time(attempt, scene, draw=draw)
    cause, cause_s = attempt.wait_for_cause(time.monotonic()) if made else ("", None)
    code = attempt.wait()
    if code is None:
        lines = " | ".join(attempt.output().splitlines()[-3:])
        trial.note("hangs", f"no end after {attempt.hang_s:.0f} s, {made}: {lines}")
    elif made is not None:
        done = replace(made, code=code, cause=cause, cause_s=cause_s)
        trial.disturbances.append(done)
        check_cause(trial, done)
    elif code != 0:
        text = attempt.output()[-400:]
        trial.note("failed", f"exit code {code}, and nothing was done to it: {text}")
    trial.num_resumes += "resumed from" in attempt.output()
    trial.num_replaced += attempt.output().count("Another process takes its place")
    for process in attempt.end_processes():
        trial.note("processes_left", process)
    if "Traceback (most recent call last)" in attempt.output():
        trial.note("tracebacks", f"{made}")
    check_checkpoints(trial, scene.run)
    return code == 0 and newest_step(scene.run) == NUM_STEPS


def _disturb_in_time(attempt: Attempt, scene: Scene, *, draw: random.Random) -> Disturbance | None:
    plan = draw_plan(scene.mode, draw, steps=NUM_STEPS, has_disk=scene.disk is not None)
    while attempt.is_running and not (attempt.has_reached(plan.step) or attempt.is_late):
        time.sleep(POLL_S)
    time.sleep(plan.delay_s)
    return disturb(
        attempt,
        plan,
        run=scene.run,
        disk=scene.disk,
        hosts=scene.hosts,
        replaces=scene.mode.replaces,
    )


def check_cause(trial: Trial, done: Disturbance) -> None:
    """Note an end that does not follow from a disturbance, or was not named in time."""
    problem = done.find_problem()
    if problem:
        trial.note(problem, f"{done}")


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
    trial.has_compared_weights = mode.is_repeatable and (
        mode.resumes_alike or trial.num_resumes == 0
    )
    if trial.has_compared_weights and ours.weights != whole.weights:
        trial.note("weights_different", f"after {list_disturbances(trial.disturbances)}")


def list_disturbances(disturbances: Sequence[Disturbance]) -> str:
    """Return what was done, with the seconds after which it was done."""
    told = [f"{done.kind} {done.action} at {done.after_s} s" for done in disturbances]
    return ", ".join(told) or "nothing"
