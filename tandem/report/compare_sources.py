# SPDX-License-Identifier: Apache-2.0
"""The reader of a run's metrics: JSON lines, TensorBoard's events, or a console log.

Console logs may be ours or verl's. The last of several values of a metric at one step counts.
Numbers that are not finite are kept, because a comparison must report them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tandem.errors import UserError
from tandem.metrics.jsonl import METRICS_FILE, read_records

_EVENTS = "tfevents"
_LINE = re.compile(r"(?<![\w/])step:(?P<step>\d+) - (?P<fields>.*)")
"""A step in a console log, after any text of a launcher or a progress bar."""
_WRAPPED = re.compile(r"[\w.]+\((?P<value>.*)\)")
"""A number as newer versions of NumPy print it, ``np.float64(0.5)``."""
_COLOR = re.compile(r"\x1b\[[0-9;]*m")

_Value = tuple[str, int, float]
"""Metric, step, value."""


@dataclass(frozen=True, slots=True)
class MetricLog:
    """The metrics of a run: ``columns[metric][step]``, steps ascending."""

    path: Path
    columns: Mapping[str, Mapping[int, float]]


def read_metrics(path: Path, *, key: str) -> MetricLog:
    """Read a run folder, a folder of events, or a file in any of the formats.

    Args:
        key: the name of this run on the command line, for messages.

    Raises:
        UserError: ``path`` does not exist, cannot be read, or has no metrics.
    """
    try:
        values = _read(path, key)
        columns = _columns(values)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UserError(
            key, str(path), rule=f"cannot be read ({reason})", remedy="Give another file."
        ) from error
    if not columns:
        raise UserError(
            key,
            str(path),
            rule="holds no metrics of any step",
            remedy=f"Give a run folder, {METRICS_FILE}, TensorBoard's events, "
            "or a console log with lines step:N - name:value.",
        )
    return MetricLog(path, columns)


def _read(path: Path, key: str) -> Iterable[_Value]:
    if path.is_dir():
        if (path / METRICS_FILE).exists():
            return _json_values(path / METRICS_FILE)
        if any(_EVENTS in child.name for child in path.iterdir()):
            return _event_values(path)
        raise UserError(
            key,
            str(path),
            rule=f"holds neither {METRICS_FILE} nor TensorBoard's events",
            remedy="Give the folder or the file to which a run wrote its metrics.",
        )
    if _EVENTS in path.name:
        with path.open("rb"):  # raises for a missing file, unlike the reader
            return _event_values(path)
    if path.suffix == ".jsonl":
        with path.open("rb"):  # likewise
            return _json_values(path)
    return _console_values(path)


def _json_values(path: Path) -> Iterator[_Value]:
    for record in read_records(path):
        step = record.get("step")
        if not isinstance(step, int):
            continue
        for name, value in record.items():
            if value is None:
                yield name, step, math.nan  # null stands for any number that is not finite
            elif isinstance(value, int | float) and name != "step":
                yield name, step, float(value)


def _event_values(path: Path) -> Iterator[_Value]:
    accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
    accumulator.Reload()
    for name in accumulator.Tags()["scalars"]:
        for event in accumulator.Scalars(name):
            yield name, event.step, float(event.value)


def _console_values(path: Path) -> Iterator[_Value]:
    with path.open(encoding="utf-8", errors="replace", newline=None) as stream:
        for line in stream:
            match = _LINE.search(_COLOR.sub("", line))
            if match is not None:
                yield from _fields(int(match["step"]), match["fields"])


def _fields(step: int, text: str) -> Iterator[_Value]:
    for field in text.rstrip().split(" - "):
        name, _, number = field.rpartition(":")
        value = _number(number)
        if name and value is not None:
            yield name, step, value


def _number(text: str) -> float | None:
    wrapped = _WRAPPED.fullmatch(text)
    try:
        return float(wrapped["value"] if wrapped else text)
    except ValueError:
        return None


def _columns(values: Iterable[_Value]) -> dict[str, dict[int, float]]:
    columns: dict[str, dict[int, float]] = {}
    for name, step, value in values:
        columns.setdefault(name, {})[step] = value
    return {name: dict(sorted(column.items())) for name, column in columns.items()}
