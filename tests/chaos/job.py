# SPDX-License-Identifier: Apache-2.0
"""The chaos job: runs in every mode that are disturbed at random, for a time.

    make chaos MINUTES=60 [SEED=0] [CHAOS_ARGS="--output report.json"]

Each trial is one run, of which one to three starts are disturbed (``disturbances``); then it may
end in peace. Checked are: every prompt is trained on once, checkpoints are whole, no run hangs, no
process is left, a run that was ended names the cause in time, and the final weights of repeatable
modes are those of a run that nobody disturbed, bit for bit. Prints a report in JSON. Exit code 1 if
something is wrong. The same seed draws the same disturbances.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.chaos.disturbances import SmallDisk, describe_limits, may_mount
from tests.chaos.materials import Materials, write_materials
from tests.chaos.modes import MODES, Engines, find_missing
from tests.chaos.priority import raised_priority
from tests.chaos.trials import (
    Outcome,
    Scene,
    Trial,
    compare,
    list_disturbances,
    outcome_of,
    try_start,
)
from tests.fakes.hosts import Hosts, NoNamespaces, two_hosts
from tests.fakes.tiny_run import metrics_of

MAX_DISTURBANCES = 3
COUNTED = (
    *("prompts_lost", "prompts_doubled", "rows_lost", "rows_doubled", "torn_checkpoints"),
    *("hangs", "processes_left", "unnamed", "late", "weights_different", "failed", "tracebacks"),
)
"""The kinds of problems, which a report counts even where there are none."""


class Chaos:
    """The trials of a job.

    Args:
        folder: an empty folder for the runs; that of a trial without problems is removed.
        has_disks: whether runs get a file system of their own, which can be filled.
        hosts: the hosts for runs of two nodes.
    """

    def __init__(
        self,
        folder: Path,
        materials: Materials,
        *,
        seed: int,
        has_disks: bool = False,
        hosts: Hosts | None = None,
    ) -> None:
        self.trials: list[Trial] = []
        self.calls_per_episode: float | None = None
        self._folder, self._materials, self._seed = folder, materials, seed
        self._has_disks, self._hosts = has_disks, hosts
        self._wholes: dict[str, Outcome] = {}

    def run(self, modes: Sequence[str], *, seconds: float) -> dict[str, Any]:
        """Try the modes in turn until the time is over, each at least once; return the report.

        Ctrl-C ends the job early. The trial under way is then left out.
        """
        begin_s = time.monotonic()
        try:
            while len(self.trials) < len(modes) or time.monotonic() - begin_s < seconds:
                number = len(self.trials)
                trial = self.try_run(modes[number % len(modes)], number)
                self.trials.append(trial)
                told = list_disturbances(trial.disturbances)
                say(f"{number + 1}: {trial.mode}: {told}: {trial.problems or 'no problem'}")
        except KeyboardInterrupt:
            for command in multiprocessing.active_children():  # all else ends with its command
                command.kill()
                command.join()
        report = summarise(self.trials, seconds=time.monotonic() - begin_s)
        return report | {"calls_of_tools_per_episode": self.calls_per_episode}

    def try_run(self, name: str, number: int) -> Trial:
        """Run to the end under disturbances, and compare with the undisturbed run."""
        if name not in self._wholes:
            self._wholes[name] = self._leave_in_peace(name)
        trial, folder = Trial(name), self._folder / f"trial-{number}"
        disk = SmallDisk(folder / "run") if self._has_disks else None
        scene = replace(self._scene(name, folder, disk=disk), whole_s=self._wholes[name].seconds)
        draw = random.Random(f"{self._seed} {number}")
        is_over = False
        try:
            for _ in range(draw.randint(1, MAX_DISTURBANCES)):
                is_over = is_over or try_start(trial, scene, draw=draw)
            if is_over or try_start(trial, scene):
                compare(trial, scene.mode, run=scene.run, whole=self._wholes[name])
            if trial.problems:
                shutil.copytree(scene.run, folder / "kept", dirs_exist_ok=True)
        finally:
            if disk is not None:
                disk.close()
        if not trial.problems:
            shutil.rmtree(folder)
        return trial

    def _leave_in_peace(self, name: str) -> Outcome:
        """Return the outcome of a run that nobody disturbs.

        Raises:
            RuntimeError: it fails, or an agent calls no tool.
        """
        folder, trial = self._folder / "whole", Trial(name)
        shutil.rmtree(folder, ignore_errors=True)
        scene, begin_s = self._scene(name, folder), time.monotonic()
        if not try_start(trial, scene) or trial.problems:
            raise RuntimeError(f"{name}: an undisturbed run has problems: {trial.problems}")
        if scene.mode.has_tools:
            rows = metrics_of(scene.run).values()
            self.calls_per_episode = sum(row["agent/calls/mean"] for row in rows) / len(rows)
            if self.calls_per_episode < 0.5:
                raise RuntimeError(f"{name}: {self.calls_per_episode} calls an episode")
        return replace(outcome_of(scene.run), seconds=time.monotonic() - begin_s)

    def _scene(self, name: str, folder: Path, *, disk: SmallDisk | None = None) -> Scene:
        mode, run = MODES[name], folder / "run"
        hosts = self._hosts if mode.num_nodes > 1 else None
        return Scene(mode, self._materials.arguments(mode, run), run, folder, disk, hosts)


def summarise(trials: Sequence[Trial], *, seconds: float) -> dict[str, Any]:
    """Return the counts of all trials, and every problem."""
    made = [done for trial in trials for done in trial.disturbances]
    problems = {
        kind: [text for trial in trials for text in trial.problems.get(kind, ())]
        for kind in COUNTED
    }
    slowest: dict[str, float] = {}
    for done in made:
        if done.cause_s is not None and done.kind != "driver":
            slowest[done.action] = max(slowest.get(done.action, 0.0), round(done.cause_s, 2))
    return {
        "seconds": round(seconds, 1),
        "trials": len(trials),
        "trials_by_mode": dict(Counter(trial.mode for trial in trials)),
        "starts": sum(trial.num_starts for trial in trials),
        "resumes": sum(trial.num_resumes for trial in trials),
        "workers_replaced": sum(trial.num_replaced for trial in trials),
        "final_weights_compared": sum(trial.has_compared_weights for trial in trials),
        "disturbances": len(made),
        "disturbances_by_kind": dict(
            sorted(Counter(f"{done.kind}, {done.action}" for done in made).items())
        ),
        "runs_that_went_on": sum(done.code == 0 for done in made),
        "runs_ended_with_a_cause": sum(bool(done.cause) for done in made),
        "slowest_cause_s": slowest,
        "cause_limits_s": describe_limits(),
        "problems": {kind: len(texts) for kind, texts in problems.items()},
        "details": {kind: texts for kind, texts in problems.items() if texts},
    }


def say(text: str) -> None:
    """Show progress on stderr; stdout holds the report."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


@contextmanager
def patched() -> Iterator[Any]:
    """Yield a function that sets an attribute, and restore the attributes at the end."""
    old: list[tuple[object, str, object]] = []

    def patch(owner: object, name: str, value: int) -> None:
        old.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        yield patch
    finally:
        for owner, name, value in old:
            setattr(owner, name, value)


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="make chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--modes", nargs="*", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--output", type=Path, help="a file for the report")
    parser.add_argument("--nice", type=int, default=-5, help="priority, where it is permitted")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    with raised_priority(options.nice) as niceness:
        report: dict[str, Any] = {
            "benchmark": "chaos",
            "date": date.today().isoformat(),
            "device": "cpu",
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": "python -m tests.chaos.job " + " ".join(sys.argv[1:]),
            "seed": options.seed,
            "niceness": niceness,
            "load_at_start": os.getloadavg()[0],
            **_run_modes(folder, options),
            "load_at_end": os.getloadavg()[0],
        }
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    if not report["details"]:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    say(f"the runs with problems are in {folder}")
    return 1


def _run_modes(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run the job as far as this machine permits; return its report, and what was not tried."""
    engines = Engines.find()
    with ExitStack() as stack:
        hosts: Hosts | None = None
        if "two nodes" in options.modes:
            try:
                hosts = stack.enter_context(two_hosts())
            except NoNamespaces as error:
                say(str(error))
        missing = find_missing(engines=engines, has_hosts=hosts is not None)
        modes = [mode for mode in options.modes if mode not in missing]
        not_tried = [f"{mode}: {missing[mode]}" for mode in options.modes if mode in missing]
        has_disks = may_mount(folder / "disk")
        if not has_disks:
            not_tried.append("full disks: file systems may not be mounted")
        patch = stack.enter_context(patched())
        with_tools = any(MODES[mode].has_tools for mode in modes)
        materials = write_materials(
            folder / "materials", patch=patch, engines=engines, with_tools=with_tools
        )
        chaos = Chaos(folder, materials, seed=options.seed, has_disks=has_disks, hosts=hosts)
        return chaos.run(modes, seconds=60 * options.minutes) | {"not_tried": not_tried}


if __name__ == "__main__":
    sys.exit(main())
