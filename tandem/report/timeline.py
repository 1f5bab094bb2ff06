# SPDX-License-Identifier: Apache-2.0
"""The trace of an asynchronous run for its report: who worked when over the last steps, and over
the whole run how idle each role was, what was waited for, and how old samples were.

Bounded: at most ``_MAX_BARS`` bars a track. All text is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.metrics.number_format import format_duration
from tandem.report.series import Column

_STEPS_SHOWN = 8
_MAX_BARS = 400
_NUM_COLORS = 7
_SECOND = 1e6
_STEP_TRACK = "step"
_WAIT_PREFIX = "wait: "
_WAITS = " (waits)"
_LAG_PREFIX = "training/lag/share/lag_"


@dataclass(frozen=True, slots=True)
class Bar:
    """A piece of work; ``left`` and ``width`` in percent of what is shown. Colour is by version."""

    left: float
    width: float
    color: int
    title: str


@dataclass(frozen=True, slots=True)
class Track:
    """One role, or one of its engines; ``idle`` is its share over the whole run, in words."""

    name: str
    idle: str
    bars: tuple[Bar, ...]


@dataclass(frozen=True, slots=True)
class Timeline:
    """What is drawn.

    Attributes:
        seconds: how much time the bars span, in words.
        steps: where steps ended, in percent, and their names.
        waits: role, what it waited for, how long, share of the run.
        lags: lag, share of samples in percent.
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
    """The timeline of a trace as ``trace_file.read_trace`` gives it; None without work in it."""
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
    """The last steps: from the end of the one before them on."""
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
    """The longest first."""
    sums: dict[tuple[str, str], float] = {}
    for event in events:
        role = names[event["tid"]].removesuffix(_WAITS)
        key = role, str(event["name"]).removeprefix(_WAIT_PREFIX)
        sums[key] = sums.get(key, 0.0) + float(event["dur"])
    longest_first = sorted(sums.items(), key=lambda item: -item[1])
    return tuple(
        (role, what, format_duration(spent / _SECOND), _percent(spent / run))
        for (role, what), spent in longest_first
    )


def _lags(columns: Mapping[str, Column]) -> tuple[tuple[int, float], ...]:
    """Mean over the steps of the share of each lag; a step without a lag has 0 of it."""
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
