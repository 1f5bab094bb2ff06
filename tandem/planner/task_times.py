# SPDX-License-Identifier: Apache-2.0
"""The measured seconds of each task of a training step, from earlier runs or from a table.

The planner predicts other splits of the devices from them. For a number of devices that was not
measured, the seconds are ``fixed + divided / devices`` (least squares, neither part below 0). If
only one number of devices was measured, ``fixed`` is 0.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tandem.config.derived.pools import TASKS, place_run
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError
from tandem.metrics.decode_pace import DecodePace
from tandem.metrics.trace import PAUSE
from tandem.report.run_folder import RunData, read_run
from tandem.report.series import Column

TIMES_OPTION = "--times"
"""The option of ``tandem plan`` that names the measured runs."""
SYNC = "sync"
_GENERATE = "generate"
_LENGTHS = "response_lengths"
_SECTIONS = {
    _GENERATE: ("gen",),
    "logp": ("old_log_prob",),
    "ref_logp": ("ref",),
    "actor-train": ("update_actor", "values", "update_critic"),
    SYNC: ("update_weights",),
}
"""The sections of a synchronous step, for runs without ``pipeline/busy_s``. Every run has the first
section of each task."""
_NUM_WARMUP_STEPS = 1
_MAX_LENGTHS = 256
_SATURATED_IDLE_SHARE = 0.1

Measurements = Mapping[str, tuple[tuple[int, float], ...]]
"""The (devices, seconds) pairs of each task."""


@dataclass(frozen=True, slots=True)
class Decoding:
    """The pace of decode steps and the lengths of responses.

    Attributes:
        mean_tokens: the mean number of tokens of a response; each takes one decode step.
        num_sequences: the number of sequences in a batch.
        num_rows: the number of sequences that one engine generates at once.
    """

    pace: DecodePace
    mean_tokens: float
    num_sequences: int
    num_rows: int

    def saturated_s(self, num_engines: int) -> float:
        """Return the seconds of a batch on engines whose rows are always full."""
        num_steps = self.num_sequences * self.mean_tokens / (num_engines * self.num_rows)
        return num_steps * self.pace.step_s(self.num_rows)


@dataclass(frozen=True, slots=True)
class TaskTimes:
    """The seconds of the tasks of one training step.

    Attributes:
        measured: the measured seconds. The seconds of ``generate`` are those of a batch on fully
            loaded engines; a batch alone takes longer by the factor longest / mean response.
        relative_lengths: the lengths of responses, ascending, with mean 1; (1,) if unknown.
        longest: the longest response of a batch, relative to the mean; 0 if unknown.
        rows_share: the share of a batch that was generated at once while ``generate`` was measured.
        decoding: the pace of decode steps, if a run has measured it; ``generate`` follows from it.

    Example:
        >>> times = TaskTimes({"actor-train": ((2, 5.0), (4, 3.0))}, (1.0,))
        >>> times.seconds("actor-train", 8)  # 1 + 8 / 8
        2.0
    """

    measured: Measurements
    relative_lengths: tuple[float, ...]
    longest: float = 0.0
    rows_share: float = 1.0
    decoding: Decoding | None = None

    def planned(self, config: RunConfig) -> TaskTimes:
        """Return these times with the numbers of sequences and rows of ``config``."""
        if self.decoding is None:
            return self
        rows = config.actor_rollout_ref.rollout.max_num_seqs
        decoding = replace(self.decoding, num_sequences=config.sequences_per_step, num_rows=rows)
        return replace(self, decoding=decoding)

    def seconds(self, task: str, num_devices: int) -> float:
        """Return the seconds of a task on so many devices, 0 if it was not measured."""
        if task == _GENERATE and self.decoding is not None:
            return self.decoding.saturated_s(num_devices)
        points = self.measured.get(task, ())
        if not points:
            return 0.0
        if task == SYNC:
            return statistics.fmean(seconds for _, seconds in points)
        fixed, divided = _fit(points)
        return fixed + divided / num_devices


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """The times of a run, its configuration, and the median wall time of its steps."""

    times: TaskTimes
    config: RunConfig
    step_s: float


def read_times(paths: Sequence[Path]) -> TaskTimes:
    """Return the times of several run folders and tables together.

    Raises:
        UserError: one of them cannot be read or holds no times.
    """
    found = [measured_run(p).times if p.is_dir() else _read_table(p) for p in paths]
    measured: dict[str, list[tuple[int, float]]] = {}
    for times in found:
        for task, points in times.measured.items():
            measured.setdefault(task, []).extend(points)
    richest = max(found, key=lambda t: (t.decoding is not None, len(t.relative_lengths)))
    points_by_task = {task: tuple(points) for task, points in measured.items()}
    return replace(richest, measured=points_by_task)


def measured_run(folder: Path) -> MeasuredRun:
    """Read the times of a run from its folder.

    Raises:
        UserError: the folder holds no run of ``tandem train`` with two steps or more.
    """
    run = read_run(folder)
    config = _config_of(run)
    lengths, longest = _relative_lengths(run), _longest(run)
    devices = {task: pool.num_devices for pool in place_run(config).pools for task in pool.tasks}
    all_lengths = (*lengths, longest) if longest > lengths[-1] else lengths
    idle = _generation_idle_share(run)
    is_saturated = idle is not None and idle < _SATURATED_IDLE_SHARE
    # A batch alone is timed as a whole; an engine with idle time, by its share of one.
    num_shares = 1 if idle is None else devices[_GENERATE]
    slowdown = 1.0 if is_saturated else expected_longest(all_lengths, num_shares)
    measured: dict[str, tuple[tuple[int, float], ...]] = {}
    for task in (*TASKS, SYNC):
        seconds = _task_seconds(run, task)
        if task == _GENERATE and seconds is not None:
            seconds /= slowdown
        if seconds:
            measured[task] = ((devices.get(task, 1), seconds),)
    wall = _median(run, "pipeline/wall_s") or _median(run, "timing_s/step")
    if _GENERATE not in measured or "actor-train" not in measured or wall is None:
        raise UserError(
            TIMES_OPTION,
            str(folder),
            rule="holds no times of generation and training",
            remedy="Name the folder of a run with two steps or more, or a table.",
        )
    rows = config.actor_rollout_ref.rollout.max_num_seqs * devices[_GENERATE]
    rows_share = min(rows / config.sequences_per_step, 1.0) if is_saturated else 1.0
    times = TaskTimes(measured, lengths, longest, rows_share, _decoding(run, config))
    return MeasuredRun(times, config, wall)


def _config_of(run: RunData) -> RunConfig:
    try:
        return RunConfig.model_validate(run.config)
    except ValueError as error:
        raise UserError(
            TIMES_OPTION,
            str(run.folder),
            rule=f"its config.json is not of tandem train ({str(error).splitlines()[0]})",
            remedy="Name the folder of a run of tandem train.",
        ) from error


def _task_seconds(run: RunData, task: str) -> float | None:
    busy = _median(run, f"pipeline/busy_s/{task}")
    if busy is not None:
        return busy
    first, *others = (_median(run, f"timing_s/{section}") for section in _SECTIONS[task])
    return None if first is None else first + sum(seconds or 0.0 for seconds in others)


def _decoding(run: RunData, config: RunConfig) -> Decoding | None:
    fixed_s = _median(run, "perf/decode_step_s/fixed")
    per_sequence_s = _median(run, "perf/decode_step_s/per_sequence")
    mean_tokens = _median(run, "response_length/mean")
    if fixed_s is None or per_sequence_s is None or not mean_tokens:
        return None
    rows = config.actor_rollout_ref.rollout.max_num_seqs
    pace = DecodePace(fixed_s, per_sequence_s)
    return Decoding(pace, mean_tokens, config.sequences_per_step, rows)


def _generation_idle_share(run: RunData) -> float | None:
    """Return the share of the time in which engines had free rows, None in a synchronous run.

    Pauses for an update on the same devices do not count.
    """
    idle = _median(run, f"pipeline/idle_share/{_GENERATE}")
    if idle is None:
        return None
    paused_s = _median(run, f"pipeline/wait_s/{_GENERATE}/{PAUSE}")
    wall_s = _median(run, "pipeline/wall_s")
    if paused_s and wall_s:
        paused = min(paused_s / wall_s, idle)
        idle = (idle - paused) / max(1 - paused, 1e-9)
    return idle


def expected_longest(lengths: Sequence[float], num_shares: int) -> float:
    """Return the expected maximum of a share, if ``lengths`` are dealt into shares at random.

    Args:
        lengths: the lengths, ascending.
        num_shares: the number of equal shares.
    """
    size = -(-len(lengths) // num_shares)
    expected, unseen = 0.0, 1.0
    for count in range(len(lengths), size - 1, -1):
        expected += unseen * size / count * lengths[count - 1]
        unseen *= 1 - size / count
    return expected


def _median(run: RunData, name: str) -> float | None:
    """Return the median over all steps but the first, the warm-up; None without others."""
    column: Column = run.columns.get(name, ())
    values = [value for step, value in column if step > _NUM_WARMUP_STEPS]
    return statistics.median(values) if values else None


def _relative_lengths(run: RunData) -> tuple[float, ...]:
    late = [r for r in run.rollouts if 2 * int(r["step"]) >= run.num_steps]
    lengths = sorted(len(r["tokens"]) for r in late if r.get("tokens"))
    stride = max(-(-len(lengths) // _MAX_LENGTHS), 1)
    # The longest stays: it decides how long a batch takes.
    return _relative(lengths[::-1][::stride][::-1])


def _longest(run: RunData) -> float:
    """Return the longest response of a step relative to the mean, from metrics of all."""
    longest, mean = _median(run, "response_length/max"), _median(run, "response_length/mean")
    return longest / mean if longest and mean else 0.0


def _relative(lengths: Sequence[float]) -> tuple[float, ...]:
    if not lengths:
        return (1.0,)
    mean = statistics.fmean(lengths)
    return tuple(length / mean for length in lengths)


def _read_table(path: Path) -> TaskTimes:
    """Read a JSON table of the seconds of one batch by task and devices.

    Example:
        ``{"generate": {"2": 8.0, "4": 4.5}, "actor-train": {"2": 4.0}, "sync": 0.2,
        "response_lengths": [...]}``
    """
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
        own_lengths = [float(length) for length in table.pop(_LENGTHS, ())]
        measured = {str(task): _points(row) for task, row in table.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _table_error(path, str(error)) from error
    unknown = sorted(set(measured) - {*TASKS, SYNC})
    missing = [task for task in ("actor-train", _GENERATE) if not measured.get(task)]
    values = [value for points in measured.values() for point in points for value in point]
    if unknown or missing or not all(0 < value < math.inf for value in (*values, *own_lengths)):
        reason = f"unknown {unknown[0]}" if unknown else f"no {missing[0]}" if missing else ""
        raise _table_error(path, reason or "a value is not positive and finite")
    lengths = _relative(own_lengths)
    alone = measured[_GENERATE]
    measured[_GENERATE] = tuple((devices, seconds / max(lengths)) for devices, seconds in alone)
    return TaskTimes(measured, lengths)


def _table_error(path: Path, reason: str) -> UserError:
    return UserError(
        TIMES_OPTION,
        str(path),
        rule=f"must be a run folder, or a JSON table of seconds by task and devices ({reason})",
        remedy='Write {"generate": {"2": 8.0}, "actor-train": {"2": 4.0}}; tasks: '
        f"{', '.join(TASKS)}, {SYNC}.",
    )


def _points(row: Any) -> tuple[tuple[int, float], ...]:
    if isinstance(row, int | float):
        return ((1, float(row)),)
    return tuple((int(devices), float(seconds)) for devices, seconds in row.items())


def _fit(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Return ``(fixed, divided)`` of ``fixed + divided / devices``, neither below 0."""
    inverse = [1 / devices for devices, _ in points]
    seconds = [value for _, value in points]
    mean_x, mean_y = statistics.fmean(inverse), statistics.fmean(seconds)
    spread = sum((x - mean_x) ** 2 for x in inverse)
    only_divided = sum(x * y for x, y in zip(inverse, seconds, strict=True)) / sum(
        x * x for x in inverse
    )
    if spread == 0:
        return 0.0, only_divided
    products = ((x - mean_x) * (y - mean_y) for x, y in zip(inverse, seconds, strict=True))
    divided = sum(products) / spread
    fixed = mean_y - divided * mean_x
    if divided < 0:
        return mean_y, 0.0
    return (fixed, divided) if fixed >= 0 else (0.0, only_divided)
