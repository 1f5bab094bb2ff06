# SPDX-License-Identifier: Apache-2.0
"""Who worked and who waited, and for what: the recorder of asynchronous runs.

Roles are tracks: ``generate/0``, ``reward``, ``logp``, ``ref_logp``, ``actor-train``, ``sync``,
``validation``. What overlaps on one track counts once, and repeated calls of one kind become one
event, so that a track costs a few events a step. Sums are kept for each step; events go straight to
``trace_file.TraceFile``. The clock comes in as a parameter; nothing here waits for a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol

_MERGED_GAP_S = 0.005
_WAIT_PREFIX = "wait: "
PAUSE = "update"
"""What generation waits for that takes turns with training."""

Details = Mapping[str, float | str]
_NO_DETAILS: Details = {}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """Something that took from ``begin_s`` to ``end_s`` on ``track``; a mark if both are equal.

    ``is_wait``: the role of the track did nothing but wait. ``num_calls`` were merged into it.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    is_wait: bool = False
    num_calls: int = 1
    details: Details = field(default_factory=dict[str, float | str])


class TraceSink(Protocol):
    """Where events go, in order of their ends on each track."""

    def append(self, event: TraceEvent) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Track:
    """How deep in spans a track is, since when, and the event that may still grow."""

    depth: int = 0
    begin_s: float = 0.0
    counted_from_s: float = 0.0
    sum_s: float = 0.0
    name: str = ""
    details: Details = field(default_factory=dict[str, float | str])
    last: TraceEvent | None = None


class TraceRecorder:
    """Records spans, waits and marks.

    Args:
        clock: seconds, of which only differences are used.
        sink: takes the events; None keeps the sums only.

    Example:
        >>> trace = TraceRecorder(clock, sink=None)
        >>> with trace.waiting("actor-train", "batch"):
        ...     batch = await buffer.take(8)
        >>> with trace.span("actor-train", "update", details={"version": 3}):
        ...     await update(batch)
        >>> trace.take_step(4)["pipeline/idle_share/actor-train"]
        0.37
    """

    def __init__(self, clock: Callable[[], float], *, sink: TraceSink | None) -> None:
        self._clock = clock
        self._sink = sink
        self._busy: dict[str, _Track] = {}
        self._waits: dict[tuple[str, str], _Track] = {}
        self._step_began_s = clock()

    @contextmanager
    def span(self, role: str, name: str, *, details: Details = _NO_DETAILS) -> Iterator[None]:
        """``role`` works. A role of several engines is ``role/number``."""
        track = self._busy.setdefault(role, _Track())
        self._enter(track, name, details=details)
        try:
            yield
        finally:
            self._leave(track, role, is_wait=False)

    def expect(self, role: str) -> None:
        """``role`` is idle until its first span, and counts as such."""
        self._busy.setdefault(role, _Track())

    @contextmanager
    def waiting(self, role: str, what: str) -> Iterator[None]:
        """``role`` can do nothing until ``what`` is there."""
        track = self._waits.setdefault((role, what), _Track())
        self._enter(track, _WAIT_PREFIX + what, details=_NO_DETAILS)
        try:
            yield
        finally:
            self._leave(track, role, is_wait=True)

    def mark(self, role: str, name: str, *, details: Details = _NO_DETAILS) -> None:
        """Something that took no time, such as weights coming into use."""
        if self._sink is not None:
            now_s = self._clock()
            self._sink.append(TraceEvent(role, name, now_s, now_s, details=details))

    def take_step(self, step: int) -> dict[str, float]:
        """Metrics since the last call, which starts over.

        ``pipeline/busy_s/<role>`` and ``pipeline/idle_share/<role>`` (means over a role's engines),
        ``pipeline/wait_s/<role>/<what>``, ``pipeline/wall_s``.
        """
        now_s = self._clock()
        wall_s, self._step_began_s = now_s - self._step_began_s, now_s
        metrics = {"pipeline/wall_s": wall_s}
        busy = {role: _taken(track, now_s) for role, track in self._busy.items()}
        for name, seconds in _means(busy).items():
            metrics[f"pipeline/busy_s/{name}"] = seconds
            if wall_s > 0:
                metrics[f"pipeline/idle_share/{name}"] = max(0.0, 1 - seconds / wall_s)
        waits = {f"{role}/{what}": _taken(t, now_s) for (role, what), t in self._waits.items()}
        metrics.update({f"pipeline/wait_s/{name}": seconds for name, seconds in waits.items()})
        self.mark("step", f"step {step}", details={"wall_s": wall_s})
        if self._sink is not None:
            self._sink.flush()
        return metrics

    def close(self) -> None:
        """Hand over what is still held back; idempotent."""
        for tracks in (self._busy, self._waits):
            for track in tracks.values():
                self._flush(track)
        if self._sink is not None:
            self._sink.close()

    def _enter(self, track: _Track, name: str, *, details: Details) -> None:
        if track.depth == 0:
            track.begin_s = track.counted_from_s = self._clock()
            track.name, track.details = name, details
        track.depth += 1

    def _leave(self, track: _Track, role: str, *, is_wait: bool) -> None:
        track.depth -= 1
        if track.depth > 0:
            return
        now_s = self._clock()
        track.sum_s += now_s - track.counted_from_s
        if self._sink is None:
            return
        event = TraceEvent(
            role, track.name, track.begin_s, now_s, is_wait=is_wait, details=track.details
        )
        last = track.last
        if last is not None and _continues(last, event):
            event = replace(event, begin_s=last.begin_s, num_calls=last.num_calls + 1)
        else:
            self._flush(track)
        track.last = event

    def _flush(self, track: _Track) -> None:
        if track.last is not None and self._sink is not None:
            self._sink.append(track.last)
        track.last = None


def _continues(last: TraceEvent, event: TraceEvent) -> bool:
    """Whether ``event`` is more of the same right after ``last``."""
    is_same = last.name == event.name and last.details == event.details
    return is_same and event.begin_s - last.end_s <= _MERGED_GAP_S


def _taken(track: _Track, now_s: float) -> float:
    """Seconds of the track since the last call, a span under way included."""
    if track.depth > 0:
        track.sum_s += now_s - track.counted_from_s
        track.counted_from_s = now_s
    seconds, track.sum_s = track.sum_s, 0.0
    return seconds


def _role_of(track: str) -> str:
    """``generate`` of ``generate/0``."""
    return track.split("/", maxsplit=1)[0]


def _means(busy: Mapping[str, float]) -> dict[str, float]:
    """Seconds by role; of roles with several engines (``generate/0``, ...) the mean."""
    engines: dict[str, list[float]] = {}
    for role, seconds in busy.items():
        engines.setdefault(_role_of(role), []).append(seconds)
    return {role: sum(seconds) / len(seconds) for role, seconds in engines.items()}
