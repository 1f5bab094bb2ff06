# SPDX-License-Identifier: Apache-2.0
"""The trace of an asynchronous run: the work and the waits of each role, and their causes.

Roles are tracks: ``generate/0``, ``environment``, ``reward``, ``logp``, ``ref_logp``,
``actor-train``, ``sync``, ``validation``. Overlapping spans of a track count once, and repeated
calls become one event, so that a track has a few events per step. ``TraceRecorder`` keeps sums for
each step and passes events to a ``TraceFile``. Nothing here waits for a device.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
MAX_EVENTS = 400_000
WAIT_PREFIX = "wait: "
"""The prefix of the names of waits."""
WAITS_SUFFIX = " (waits)"
"""The suffix of the track of a role's waits."""
PAUSE = "update"
"""The cause of the waits of an engine that shares its devices with training."""
_MERGED_GAP_S = 0.005
_MICROSECONDS = 1e6
_OPENING = b"[\n"
_CLOSING = b"\n]\n"

Details = Mapping[str, float | str]
_NO_DETAILS: Details = {}


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """An event from ``begin_s`` to ``end_s`` on ``track``; a mark if both are equal.

    ``is_wait``: the role waited. ``num_calls``: the number of calls that the event merges.
    """

    track: str
    name: str
    begin_s: float
    end_s: float
    is_wait: bool = False
    num_calls: int = 1
    details: Details = field(default_factory=dict[str, float | str])


class TraceSink(Protocol):
    """A receiver of events, ordered by their ends on each track."""

    def append(self, event: TraceEvent) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(slots=True)
class _Track:
    """The open spans of a track, their start, and the last event, which may still be extended."""

    depth: int = 0
    begin_s: float = 0.0
    counted_from_s: float = 0.0
    sum_s: float = 0.0
    name: str = ""
    details: Details = field(default_factory=dict[str, float | str])
    last: TraceEvent | None = None


class TraceRecorder:
    """A recorder of spans, waits and marks.

    Args:
        clock: the time in seconds; only differences are used.
        sink: the receiver of events; None keeps the sums only.

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
        """Record work of ``role``, which is ``name/number`` for one of several engines."""
        track = self._busy.setdefault(role, _Track())
        self._enter(track, name, details=details)
        try:
            yield
        finally:
            self._leave(track, role, is_wait=False)

    def expect(self, role: str) -> None:
        """Count ``role`` as idle until its first span."""
        self._busy.setdefault(role, _Track())

    @contextmanager
    def waiting(self, role: str, what: str) -> Iterator[None]:
        """Record that ``role`` waits for ``what``."""
        track = self._waits.setdefault((role, what), _Track())
        self._enter(track, WAIT_PREFIX + what, details=_NO_DETAILS)
        try:
            yield
        finally:
            self._leave(track, role, is_wait=True)

    def mark(self, role: str, name: str, *, details: Details = _NO_DETAILS) -> None:
        """Record an instant, such as a switch to new weights."""
        if self._sink is not None:
            now_s = self._clock()
            self._sink.append(TraceEvent(role, name, now_s, now_s, details=details))

    def take_step(self, step: int) -> dict[str, float]:
        """Return the metrics since the last call, and reset them.

        They are ``pipeline/wall_s``, ``pipeline/busy_s/<role>`` and ``pipeline/idle_share/<role>``
        (means over a role's engines), and ``pipeline/wait_s/<role>/<what>``.
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
        """Pass on the pending events and close the sink; idempotent."""
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
    """Return whether ``event`` repeats ``last`` right after it."""
    is_same = last.name == event.name and last.details == event.details
    return is_same and event.begin_s - last.end_s <= _MERGED_GAP_S


def _taken(track: _Track, now_s: float) -> float:
    """Return the seconds of the track since the last call, with its open spans."""
    if track.depth > 0:
        track.sum_s += now_s - track.counted_from_s
        track.counted_from_s = now_s
    seconds, track.sum_s = track.sum_s, 0.0
    return seconds


def _means(busy: Mapping[str, float]) -> dict[str, float]:
    """Average the seconds of the engines of each role (``generate/0``, ...)."""
    engines: dict[str, list[float]] = {}
    for role, seconds in busy.items():
        engines.setdefault(role.split("/", maxsplit=1)[0], []).append(seconds)
    return {role: sum(seconds) / len(seconds) for role, seconds in engines.items()}


class TraceFile:
    """A ``TraceSink`` that writes ``trace.json`` in Chrome's format (chrome://tracing, Perfetto).

    The file has one event per line, so that viewers and ``read_trace`` can also open the file of a
    killed run. A resumed run continues the time axis at the last event. After ``MAX_EVENTS``,
    further events are dropped. A failure to write never stops the run.

    Args:
        resumes: whether to continue the existing file instead of replacing it.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float], resumes: bool) -> None:
        self._path = path
        earlier = read_trace(path) if resumes else []
        self._num_events = len(earlier)
        end_us = max((float(e.get("ts", 0)) + float(e.get("dur", 0)) for e in earlier), default=0.0)
        self._origin_s = clock() - end_us / _MICROSECONDS
        self._tracks = {
            str(e["args"]["name"]): int(e["tid"]) for e in earlier if e.get("ph") == "M"
        }
        self._stream: BinaryIO | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = path.open("wb")
            self._stream.write(_OPENING + b",\n".join(_encoded(event) for event in earlier))
        except OSError as error:
            self._give_up(error)
        self._is_empty = not earlier

    def append(self, event: TraceEvent) -> None:
        if self._stream is None or self._num_events >= MAX_EVENTS:
            return
        record: dict[str, Any] = {
            "name": event.name,
            "cat": "wait" if event.is_wait else "work",
            "ph": "X" if event.end_s > event.begin_s else "i",
            "ts": self._microseconds(event.begin_s),
            "pid": 1,
            "tid": self._track(event.track + (WAITS_SUFFIX if event.is_wait else "")),
            "args": {**event.details, "calls": event.num_calls},
        }
        if record["ph"] == "X":
            record["dur"] = round((event.end_s - event.begin_s) * _MICROSECONDS, 1)
        else:
            record["s"] = "t"
        self._write(record)
        if self._num_events >= MAX_EVENTS:
            logger.warning("%s: further events are dropped after %d", self._path, MAX_EVENTS)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except OSError as error:
                self._give_up(error)

    def close(self) -> None:
        """Complete the file; idempotent."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        try:
            stream.write(_CLOSING)
            stream.close()
        except OSError as error:
            self._give_up(error)

    def _track(self, name: str) -> int:
        """Return the number of a track; write its name on first use."""
        if name not in self._tracks:
            self._tracks[name] = len(self._tracks) + 1
            number = self._tracks[name]
            record = {"name": "thread_name", "ph": "M", "pid": 1, "tid": number}
            self._write({**record, "args": {"name": name}})
        return self._tracks[name]

    def _microseconds(self, seconds: float) -> float:
        return round((seconds - self._origin_s) * _MICROSECONDS, 1)

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._stream is None:
            return
        separator = b"" if self._is_empty else b",\n"
        self._is_empty = False
        self._num_events += 1
        try:
            self._stream.write(separator + _encoded(record))
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        self._stream = None
        logger.warning("%s: the trace ends here: %s", self._path, error)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """Read all events of a file, which may still be growing; [] if there is no file."""
    try:
        text = path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return list(_events(text))


def _events(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            event = json.loads(line.rstrip(","))
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event


def _encoded(record: Mapping[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode("ascii")
