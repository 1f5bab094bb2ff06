# SPDX-License-Identifier: Apache-2.0
"""The chaos job: runs in every mode whose processes are killed at random, for a time.

    make chaos MINUTES=60 [SEED=0] [CHAOS_ARGS="--output report.json"]

Each trial is one run. One to three of its starts lose a process at a random moment; then the run
may end undisturbed. Checked are: every prompt is trained on once, checkpoints are whole, no run
hangs, no process is left, a run that a death ended names it within 10 s, and the final weights of
repeatable modes are those of a run that nobody disturbed, bit for bit. Prints a report in JSON.
Exit code 1 if something is wrong. The same seed kills the same kinds after the same steps.
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
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tests.chaos.modes import MODES, Materials, write_materials
from tests.chaos.trials import (
    MAX_CAUSE_S,
    Attempt,
    Outcome,
    Trial,
    compare,
    disturb,
    outcome_of,
)

MAX_KILLS = 3
COUNTED = (
    *("prompts_lost", "prompts_doubled", "rows_lost", "rows_doubled", "torn_checkpoints"),
    *("hangs", "processes_left", "unnamed", "late", "weights_different", "failed"),
)
"""The kinds of problems, which a report counts even where there are none."""


def run_chaos(
    folder: Path, materials: Materials, *, seconds: float, seed: int, modes: Sequence[str]
) -> dict[str, Any]:
    """Try the modes in turn until the time is over, each at least once; return the report.

    Ctrl-C ends the job early. The trial under way is then left out.

    Args:
        folder: an empty folder for the runs; that of a trial without problems is removed.
    """
    begin_s, wholes = time.monotonic(), {}
    trials: list[Trial] = []
    try:
        while len(trials) < len(modes) or time.monotonic() - begin_s < seconds:
            number = len(trials)
            name = modes[number % len(modes)]
            if name not in wholes:
                wholes[name] = undisturbed(folder / "whole", materials, name=name)
            draw = random.Random(f"{seed} {number}")
            trial = try_run(
                folder / f"trial-{number}", materials, name=name, whole=wholes[name], draw=draw
            )
            trials.append(trial)
            kinds = ", ".join(f"{kill.kind} {kill.signal}" for kill in trial.kills) or "nothing"
            say(f"{number + 1}: {name}: killed {kinds}: {trial.problems or 'no problem'}")
    except KeyboardInterrupt:
        for command in multiprocessing.active_children():  # all else ends with its command
            command.kill()
            command.join()
    return summarise(trials, seconds=time.monotonic() - begin_s)


def undisturbed(folder: Path, materials: Materials, *, name: str) -> Outcome:
    """Return the outcome of a run that nobody disturbs.

    Raises:
        RuntimeError: it fails.
    """
    shutil.rmtree(folder, ignore_errors=True)
    run, trial = folder / "run", Trial(name)
    attempt = Attempt(materials.arguments(MODES[name], run), folder=folder)
    code = attempt.wait(trial)
    if code != 0:
        raise RuntimeError(f"{name}: an undisturbed run ends with {code}: {attempt.output()}")
    return outcome_of(run)


def try_run(
    folder: Path, materials: Materials, *, name: str, whole: Outcome, draw: random.Random
) -> Trial:
    """Run to the end under kills, and compare with the undisturbed run."""
    mode, trial, run = MODES[name], Trial(name), folder / "run"
    arguments = materials.arguments(mode, run)
    is_over = False
    for _ in range(draw.randint(1, MAX_KILLS)):
        if not is_over:
            is_over = disturb(
                trial,
                mode,
                arguments=arguments,
                folder=folder,
                draw=draw,
            )
    if not is_over:
        attempt = Attempt(arguments, folder=folder / "last")
        code = attempt.wait(trial)
        attempt.check_end(trial)
        if code != 0:
            trial.note("failed", f"the last start ended with {code}: {attempt.output()[-400:]}")
            return trial
    compare(trial, mode, run=run, whole=whole)
    if not trial.problems:
        shutil.rmtree(folder)
    return trial


def summarise(trials: Sequence[Trial], *, seconds: float) -> dict[str, Any]:
    """Return the counts of all trials, and every problem."""
    kills = [kill for trial in trials for kill in trial.kills]
    problems = {
        kind: [text for trial in trials for text in trial.problems.get(kind, ())]
        for kind in COUNTED
    }
    named = [kill.cause_s for kill in kills if kill.cause_s is not None and kill.kind != "driver"]
    return {
        "seconds": round(seconds, 1),
        "trials": len(trials),
        "trials_by_mode": dict(Counter(trial.mode for trial in trials)),
        "starts": sum(trial.num_starts for trial in trials),
        "kills": len(kills),
        "kills_by_kind": dict(Counter(f"{kill.kind} {kill.signal}" for kill in kills)),
        "ended_by_a_death": len(named),
        "slowest_cause_s": round(max(named, default=0.0), 2),
        "cause_limit_s": MAX_CAUSE_S,
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
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="tandem-chaos-"))
    with patched() as patch:
        materials = write_materials(folder / "materials", patch=patch)
    found = run_chaos(
        folder,
        materials,
        seconds=60 * options.minutes,
        seed=options.seed,
        modes=options.modes,
    )
    report = {
        "benchmark": "chaos",
        "date": date.today().isoformat(),
        "device": "cpu",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "python -m tests.chaos.job " + " ".join(sys.argv[1:]),
        "seed": options.seed,
        **found,
    }
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n")
    if not found["details"]:
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    say(f"the runs with problems are in {folder}")
    return 1


if __name__ == "__main__":
    sys.exit(main())
