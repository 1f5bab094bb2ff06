# SPDX-License-Identifier: Apache-2.0
"""The console sinks: a progress bar on a terminal, a short line a step elsewhere, verl's lines."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
)
from rich.table import Column
from rich.text import Text

from tandem.metrics.activity import Activity
from tandem.metrics.number_format import format_number
from tandem.types import StepReport


@dataclass(frozen=True, slots=True)
class _Field:
    """A field ``label value unit`` of the compact line, for the first metric that a step has."""

    label: str
    metrics: tuple[str, ...]
    unit: str = ""


_REWARD = _Field("reward", ("critic/score/mean", "critic/rewards/mean"))
_LOSS = _Field("loss", ("train/loss",))
_SPEED = _Field("", ("perf/throughput",), unit=" tok/s")
_FIELDS = (
    _REWARD,
    _LOSS,
    _Field("val loss", ("val/loss",)),
    _Field("length", ("response_length/mean",)),
    _Field("entropy", ("actor/entropy",)),
    _Field("kl ref", ("actor/kl_loss", "actor/reward_kl_penalty")),
    _Field("kl old", ("actor/ppo_kl",)),
    _Field("grad", ("actor/grad_norm", "train/grad_norm")),
    _SPEED,
    _Field("", ("pipeline/wall_s", "perf/time_per_step"), unit=" s"),
    _Field("idle: generate", ("pipeline/idle_share/generate",)),
    _Field("train", ("pipeline/idle_share/actor-train",)),
    _Field("lag", ("training/lag/mean",)),
)
_VALIDATION_PREFIX = "val-core/"

LINE_WIDTH = 160
"""The longest line of a step where no terminal gives a width."""


class LineSink:
    """A ``tandem.api.MetricSink`` that writes a line of at most 160 characters a step."""

    def __init__(
        self,
        stream: TextIO,
        *,
        total_steps: int,
        clock: Callable[[], str] = lambda: time.strftime("%H:%M:%S"),
    ) -> None:
        """Write to a stream. ``clock`` returns the time of day, with which each line begins."""
        self._stream = stream
        self._total_steps = total_steps
        self._clock = clock

    def write(self, report: StepReport) -> None:
        """Write and flush one line with the most important metrics."""
        begin = f"{self._clock()} "
        line = compact_line(report, width=LINE_WIDTH - len(begin), total_steps=self._total_steps)
        self._stream.write(f"{begin}{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open."""


class VerlSink:
    """A ``tandem.api.MetricSink`` that writes verl's lines to a text stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, report: StepReport) -> None:
        """Write and flush one line with every metric."""
        self._stream.write(console_line(report) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open."""


class _Times(ProgressColumn):
    """The column ``0:43 elapsed, 1:20 left`` of the bar."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))

    def render(self, task: Task) -> Text:
        """Return the elapsed and the expected time."""
        elapsed = task.finished_time if task.finished else task.elapsed
        return Text(f"{_clock(elapsed)} elapsed, {_clock(task.time_remaining)} left")


class _CurrentPhase(ProgressColumn):
    """The column ``generating 212/640`` of the bar, asked for whenever the bar is drawn."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(Column())
        self._activity = activity

    def render(self, task: Task) -> Text:
        """Return the phase that the run is in."""
        text = f" {self._activity.describe()}"
        return Text(text, no_wrap=True, overflow="ellipsis")


class ProgressSink:
    """A ``tandem.api.MetricSink`` on a terminal: a progress bar below a line per step."""

    def __init__(
        self, stream: TextIO, *, total_steps: int, first_step: int, activity: Activity
    ) -> None:
        """Show a bar of ``total_steps``, of which ``first_step`` are done, and the phase."""
        self._console = Console(file=stream)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            _Times(),
            _CurrentPhase(activity),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        plain = sys.stderr
        self._progress.start()
        self._stderr = (plain, sys.stderr)
        if plain.isatty():
            _redirect_logs(*self._stderr)

    def write(self, report: StepReport) -> None:
        """Print the line of a step; advance the bar unless it has only validation metrics."""
        line = compact_line(report, width=self._console.width)
        self._console.print(Text(line, no_wrap=True, overflow="ellipsis"))
        if any(_render(field, report.metrics) for field in (_REWARD, _LOSS, _SPEED)):
            self._progress.update(self._task, completed=report.step)

    def close(self) -> None:
        """Stop the bar and release the terminal; idempotent."""
        self._progress.stop()
        _redirect_logs(*reversed(self._stderr))


def _redirect_logs(old: TextIO, new: TextIO) -> None:
    """Make log messages go to ``new``, which prints above the bar, instead of ``old``."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is old:  # pyright: ignore
            handler.setStream(new)


def console_line(report: StepReport) -> str:
    """Format one step as ``step:3 - critic/score/mean:0.5 - ...``, with six significant digits."""
    fields = [
        f"step:{report.step}",
        *(f"{name}:{value:.6g}" for name, value in report.metrics.items()),
    ]
    return " - ".join(fields)


def compact_line(
    report: StepReport, *, width: int | None = None, total_steps: int | None = None
) -> str:
    """Format the step and its first important numbers that fit into ``width`` characters.

    A run that only validates has no steps of its own: its ``total_steps`` is 0 and left out.
    """
    step = f"step {report.step}" + (f"/{total_steps}" if total_steps else "")
    parts = [step, *(_render(field, report.metrics) for field in _FIELDS)]
    for name, value in report.metrics.items():
        if name.startswith(_VALIDATION_PREFIX) and "/mean@" in name:
            source = name.removeprefix(_VALIDATION_PREFIX).rsplit("/", 2)[0]
            parts.append(f"val {source} {format_number(value)}")
    line = "  ".join(part for part in parts if part)
    while width is not None and len(line) > width and "  " in line:
        line = line.rpartition("  ")[0]
    return line


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _render(field: _Field, metrics: Mapping[str, float]) -> str:
    for name in field.metrics:
        if name in metrics:
            return f"{field.label} {format_number(metrics[name])}{field.unit}".lstrip()
    return ""
