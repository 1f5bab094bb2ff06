# SPDX-License-Identifier: Apache-2.0
"""``trace.json``: the events of an asynchronous run in Chrome's trace format (chrome://tracing,
Perfetto).

One event a line, appended as they come: a run that was killed leaves a file that viewers and
``read_trace`` still open. A resumed run goes on after the last event, on a time axis of its own
that begins where the earlier one ended. Disk and memory are bounded: after ``MAX_EVENTS`` the file
stays as it is, and what goes wrong with it never stops the run.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from tandem.metrics.trace import TraceEvent

logger = logging.getLogger(__name__)

TRACE_FILE = "trace.json"
MAX_EVENTS = 400_000
_MICROSECONDS = 1e6
_OPENING = b"[\n"
_CLOSING = b"\n]\n"
_WAITS = " (waits)"


class TraceFile:
    """Implements ``trace.TraceSink``.

    Args:
        resumes: whether to go on in the file that is there, rather than to replace it.
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
        """Write one event, unless there are too many already."""
        if self._stream is None or self._num_events >= MAX_EVENTS:
            return
        record: dict[str, Any] = {
            "name": event.name,
            "cat": "wait" if event.is_wait else "work",
            "ph": "X" if event.end_s > event.begin_s else "i",
            "ts": self._microseconds(event.begin_s),
            "pid": 1,
            "tid": self._track(event.track + (_WAITS if event.is_wait else "")),
            "args": {**event.details, "calls": event.num_calls},
        }
        if record["ph"] == "X":
            record["dur"] = round((event.end_s - event.begin_s) * _MICROSECONDS, 1)
        else:
            record["s"] = "t"
        self._write(record)
        if self._num_events >= MAX_EVENTS:
            logger.warning("%s: has %d events and takes no more", self._path, MAX_EVENTS)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
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
        """The number of a track, which viewers are told the name of once."""
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
        logger.warning("%s: no trace is written: %s", self._path, error)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """All events of a file, also of one still being written; [] if there is no file or no event.

    Lines that hold no event are passed over.
    """
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
