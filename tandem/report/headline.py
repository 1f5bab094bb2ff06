# SPDX-License-Identifier: Apache-2.0
"""The numbers at the top of a report, each with its first value."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from tandem.metrics.learning import (
    METRICS_READ,
    NUM_STEPS_TO_WARN,
    Sampling,
    probable_causes,
    teaches,
)
from tandem.metrics.number_format import format_duration, format_number
from tandem.report.run_folder import RunData
from tandem.report.series import Column, validation_names

_WINDOW = 10
"""The number of steps averaged at each end of a noisy curve."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A number with its name and a line of context; highlighted if ``alarming``."""

    label: str
    value: str
    note: str
    alarming: bool = False


def tiles(run: RunData) -> list[Tile]:
    """Return the tiles for which the run has data."""
    found = [
        _accuracy(run),
        _ends(run.columns, "critic/score/mean", label="Training reward"),
        _ends(run.columns, "train/loss", label="Training loss"),
        _ends(run.columns, "response_length/mean", label="Response length, tokens"),
        _throughput(run.columns),
        _duration(run),
        _failures(run.columns),
    ]
    return [tile for tile in found if tile is not None]


def banner(run: RunData) -> str | None:
    """Return a warning that steps taught nothing, with the probable causes; None without one."""
    steps: dict[int, dict[str, float]] = {}
    for name in METRICS_READ:
        for step, value in run.columns.get(name, ()):
            steps.setdefault(step, {})[name] = value
    streaks = [
        [*part] for idle, part in groupby(sorted(steps), lambda s: not teaches(steps[s])) if idle
    ]
    longest = max(streaks, key=len, default=[])
    if len(longest) < NUM_STEPS_TO_WARN:
        return None
    rollout = "actor_rollout_ref.rollout"
    sampling = Sampling(
        _lookup(run.config, f"{rollout}.do_sample") is False
        or _lookup(run.config, f"{rollout}.temperature") == 0,
        _lookup(run.config, f"{rollout}.n") or 1,
        _lookup(run.config, "data.max_response_length") or 0,
    )
    causes = probable_causes(steps[longest[-1]], sampling)
    return (
        f"Nothing was learnt from the reward in {len(longest)} steps in a row, {longest[0]} to "
        f"{longest[-1]}: {causes}."
    )


def title(run: RunData) -> str:
    """Return the name of the experiment, or of the folder."""
    return str(_lookup(run.config, "trainer.experiment_name") or run.folder.resolve().name)


def subtitle(run: RunData) -> list[str]:
    """Return project, model and algorithm, if known, and the number of steps."""
    parts = [
        _lookup(run.config, "trainer.project_name"),
        _lookup(run.config, "actor_rollout_ref.model.path") or _lookup(run.config, "model.path"),
        _lookup(run.config, "algorithm.adv_estimator"),
    ]
    return [*(str(part) for part in parts if part), f"{run.num_steps} steps"]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Flatten a nested config to rows ``(dotted key, value)``."""
    rows: list[tuple[str, str]] = []
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            rows.extend(flatten(value, f"{prefix}{name}."))
        else:
            rows.append((f"{prefix}{name}", _literal(value)))
    return rows


def _accuracy(run: RunData) -> Tile | None:
    before, after = run.summary.get("accuracy_before"), run.summary.get("accuracy_after")
    if isinstance(before, int | float) and isinstance(after, int | float):
        return Tile("Held-out accuracy", _percent(after), f"from {_percent(before)}")
    names = validation_names(run.columns)
    if not names:
        return None
    column = run.columns[names[0]]
    source = names[0].removeprefix("val-core/").rsplit("/", 2)[0]
    first, last = column[0][1], column[-1][1]
    written = _percent if all(0 <= value <= 1 for _, value in column) else format_number
    return Tile("Validation", written(last), f"from {written(first)} ({source})")


def _ends(columns: Mapping[str, Column], name: str, *, label: str) -> Tile | None:
    values = [value for _, value in columns.get(name, ())]
    if not values:
        return None
    window = _WINDOW if len(values) > 2 * _WINDOW else 1
    first, last = statistics.fmean(values[:window]), statistics.fmean(values[-window:])
    note = f"from {format_number(first)}"
    if window > 1:
        note += f", means of {_WINDOW} steps"
    return Tile(label, format_number(last), note)


def _throughput(columns: Mapping[str, Column]) -> Tile | None:
    values = [value for _, value in columns.get("perf/throughput", ())]
    if not values:
        return None
    return Tile("Throughput", format_number(statistics.median(values)), "tokens/s/device, median")


def _duration(run: RunData) -> Tile | None:
    steps = [value for _, value in run.columns.get("timing_s/step", ())]
    seconds = run.summary.get("seconds")
    if isinstance(seconds, int | float):
        note = f"whole job, {run.num_steps} training steps"
        return Tile("Time", format_duration(seconds), note)
    if not steps:
        return None
    note = f"{len(steps)} steps, median {format_duration(statistics.median(steps))}"
    return Tile("Training time", format_duration(sum(steps)), note)


def _failures(columns: Mapping[str, Column]) -> Tile | None:
    failures = sum(value for _, value in columns.get("reward/failures", ()))
    skipped = sum(value for _, value in columns.get("actor/skipped_updates", ()))
    if not failures and not skipped:
        return None
    note = f"rewards failed; {format_number(skipped)} updates skipped"
    return Tile("Failures", format_number(failures), note, alarming=True)


def _lookup(tree: Mapping[str, Any], key: str) -> Any:
    node: Any = tree
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return None
        node = node[name]
    return node


def _literal(value: Any) -> str:
    """Format a value for a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(_literal(item) for item in value) + "]"
    return str(value)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
