# SPDX-License-Identifier: Apache-2.0
"""The console sinks: a progress bar on a terminal, verl's lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

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
    _Field("kl", ("actor/kl_loss", "actor/ppo_kl")),
    _Field("grad", ("actor/grad_norm", "train/grad_norm")),
    _SPEED,
    _Field("", ("pipeline/wall_s", "perf/time_per_step"), unit=" s"),
    _Field("idle: generate", ("pipeline/idle_share/generate",)),
    _Field("train", ("pipeline/idle_share/actor-train",)),
    _Field("lag", ("training/lag/mean",)),
)
_VALIDATION_PREFIX = "val-core/"


class ConsoleSink:
    """A ``tandem.api.MetricSink`` that writes verl's lines to a text stream."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, report: StepReport) -> None:
        """Write and flush one line with every metric in full precision."""
        self._stream.write(console_line(report) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Leave the stream open."""


class ProgressSink:
    """A ``tandem.api.MetricSink`` on a terminal: a progress bar below a line per step."""

    def __init__(self, stream: TextIO, *, total_steps: int, first_step: int) -> None:
        """Show a bar of ``total_steps``, of which ``first_step`` are done."""
        self._console = Console(file=stream)
        self._progress = Progress(
            TextColumn("[bold]step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("[dim]left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step)
        self._progress.start()

    def write(self, report: StepReport) -> None:
        """Print the line of a step; advance the bar unless it has only validation metrics."""
        self._console.print(Text(compact_line(report), no_wrap=True, overflow="ellipsis"))
        headline = [_render(field, report.metrics) for field in (_REWARD, _LOSS, _SPEED)]
        if any(headline):
            description = "  ".join(text for text in headline if text)
            self._progress.update(self._task, completed=report.step, description=description)

    def close(self) -> None:
        """Stop the bar and release the terminal; idempotent."""
        self._progress.stop()


def console_line(report: StepReport) -> str:
    """Format one step as ``step:3 - critic/score/mean:0.5 - ...``, without a newline."""
    fields = [
        f"step:{report.step}",
        *(f"{name}:{value!r}" for name, value in report.metrics.items()),
    ]
    return " - ".join(fields)


def compact_line(report: StepReport) -> str:
    """Format the step and its most important numbers."""
    parts = [f"step {report.step}", *(_render(field, report.metrics) for field in _FIELDS)]
    for name, value in report.metrics.items():
        if name.startswith(_VALIDATION_PREFIX) and "/mean@" in name:
            source = name.removeprefix(_VALIDATION_PREFIX).rsplit("/", 2)[0]
            parts.append(f"val {source} {format_number(value)}")
    return "  ".join(part for part in parts if part)


def _render(field: _Field, metrics: Mapping[str, float]) -> str:
    for name in field.metrics:
        if name in metrics:
            return f"{field.label} {format_number(metrics[name])}{field.unit}".lstrip()
    return ""
