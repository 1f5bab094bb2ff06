# SPDX-License-Identifier: Apache-2.0
"""The timeline of an asynchronous run in its report.

It shows the work of each role in the last steps, and idle shares, waits and the lag of samples in
the whole run. No text comes from models or data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.metrics.number_format import format_duration
from tandem.metrics.trace import WAIT_PREFIX, WAITS_SUFFIX
from tandem.report.series import Column

_STEPS_SHOWN = 8
_MAX_BARS = 400
_NUM_COLORS = 7
_SECOND = 1e6
_STEP_TRACK = "step"
_LAG_PREFIX = "training/lag/share/lag_"


@dataclass(frozen=True, slots=True)
class Bar:
    """A span of work, coloured by version; ``left`` and ``width`` are in percent of the window."""

    left: float
    width: float
    color: int
    title: str


@dataclass(frozen=True, slots=True)
class Track:
    """A role or one of its engines; ``idle`` is its idle share in the whole run, as text."""

    name: str
    idle: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """The contents of the timeline.

    Attributes:
        seconds: the length of the window, as text.
        tracks: the tracks with work.
        steps: the position of the end of each step in percent, and its name.
        waits: rows of role, cause, duration and share of the run.
        lags: rows of lag and share of samples in percent.
    """

    seconds: str
    tracks: tuple[Track, ...]
    steps: tuple[tuple[float, str], ...]
    waits: tuple[tuple[str, str, str, str], ...]
    lags: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class _Window:
    begin: float
    end: float

    def percent(self, moment: float) -> float:
        share = (moment - self.begin) / (self.end - self.begin)
        return round(100 * min(max(share, 0.0), 1.0), 3)


def timeline(events: Sequence[Mapping[str, Any]], columns: Mapping[str, Column]) -> Timeline | None:
    """Build the timeline of the events of ``trace.read_trace``; None if they contain no work."""
    names = {e["tid"]: str(e["args"]["name"]) for e in events if e.get("ph") == "M"}
    timed = [e for e in events if e.get("ph") == "X" and e.get("tid") in names]
    work = [e for e in timed if e.get("cat") == "work"]
    if not work:
        return None
    begin, end = min(_begin(e) for e in timed), max(_end(e) for e in timed)
    marks = [e for e in events if e.get("ph") == "i" and names.get(e["tid"]) == _STEP_TRACK]
    window = _window(marks, begin=begin, end=end)
    tracks: list[Track] = []
    for name in sorted({names[e["tid"]] for e in work}):
        own = [e for e in work if names[e["tid"]] == name]
        busy = sum(float(e["dur"]) for e in own)
        tracks.append(Track(name, _percent(1 - busy / (end - begin)), _bars(own, window)))
    return Timeline(
        seconds=format_duration((window.end - window.begin) / _SECOND),
        tracks=tuple(tracks),
        steps=tuple(
            (window.percent(_begin(e)), str(e["name"])) for e in marks if _begin(e) >= window.begin
        ),
        waits=_waits([e for e in timed if e.get("cat") == "wait"], names, run=end - begin),
        lags=_lags(columns),
    )


def _window(marks: Sequence[Mapping[str, Any]], *, begin: float, end: float) -> _Window:
    """Return the window of the last steps."""
    if len(marks) <= _STEPS_SHOWN:
        return _Window(begin, end)
    return _Window(_begin(marks[-_STEPS_SHOWN - 1]), max(_begin(marks[-1]), begin + 1))


def _bars(events: Sequence[Mapping[str, Any]], window: _Window) -> tuple[Bar, ...]:
    shown = [e for e in events if _end(e) > window.begin and _begin(e) < window.end]
    shown = sorted(shown, key=lambda e: -float(e["dur"]))[:_MAX_BARS]
    return tuple(_bar(event, window) for event in sorted(shown, key=_begin))


def _bar(event: Mapping[str, Any], window: _Window) -> Bar:
    details = {name: value for name, value in event.get("args", {}).items() if name != "calls"}
    left = window.percent(_begin(event))
    words = ", ".join(f"{name} {value}" for name, value in details.items())
    seconds = format_duration(float(event["dur"]) / _SECOND)
    version = details.get("version", details.get("step", 0))
    color = int(version) % _NUM_COLORS if isinstance(version, int | float) else 0
    width = max(round(window.percent(_end(event)) - left, 3), 0.05)
    return Bar(left, width, color, f"{event['name']}: {words or 'work'}, {seconds}")


def _waits(
    events: Sequence[Mapping[str, Any]], names: Mapping[Any, str], *, run: float
) -> tuple[tuple[str, str, str, str], ...]:
    sums: dict[tuple[str, str], float] = {}
    for event in events:
        role = names[event["tid"]].removesuffix(WAITS_SUFFIX)
        key = role, str(event["name"]).removeprefix(WAIT_PREFIX)
        sums[key] = sums.get(key, 0.0) + float(event["dur"])
    longest_first = sorted(sums.items(), key=lambda item: -item[1])
    return tuple(
        (role, what, format_duration(spent / _SECOND), _percent(spent / run))
        for (role, what), spent in longest_first
    )


def _lags(columns: Mapping[str, Column]) -> tuple[tuple[int, float], ...]:
    """Average the share of each lag over the steps; a missing share counts as 0."""
    shares = {
        int(name.removeprefix(_LAG_PREFIX)): column
        for name, column in columns.items()
        if name.startswith(_LAG_PREFIX)
    }
    num_steps = max((len(column) for column in shares.values()), default=0)
    sums = {lag: sum(value for _, value in column) for lag, column in shares.items()}
    return tuple((lag, round(100 * sums[lag] / num_steps, 1)) for lag in sorted(sums))


def _begin(event: Mapping[str, Any]) -> float:
    return float(event["ts"])


def _end(event: Mapping[str, Any]) -> float:
    return float(event["ts"]) + float(event["dur"])


def _percent(share: float) -> str:
    return f"{100 * max(share, 0.0):.0f} %"
