# SPDX-License-Identifier: Apache-2.0
"""Spans, waits and sums under a virtual clock, and the file that viewers open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.metrics.trace import TraceEvent, TraceFile, TraceRecorder, read_trace


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Events:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def append(self, event: TraceEvent) -> None:
        """Keep one."""
        self.events.append(event)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to release."""


def test_idle_shares_and_waits_of_a_step_and_the_next_one_starts_over() -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=None)
    with trace.waiting("actor-train", "batch"):
        clock.now += 3
    with trace.span("actor-train", "update"):
        clock.now += 1
    assert trace.take_step(1) == {
        "pipeline/wall_s": 4.0,
        "pipeline/busy_s/actor-train": 1.0,
        "pipeline/idle_share/actor-train": 0.75,
        "pipeline/wait_s/actor-train/batch": 3.0,
    }
    clock.now += 2
    assert trace.take_step(2)["pipeline/idle_share/actor-train"] == 1.0


def test_overlapping_spans_of_a_role_count_once_and_engines_are_averaged() -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=None)
    with trace.span("reward", "reward"):
        clock.now += 1
        with trace.span("reward", "reward"):
            clock.now += 1
    with trace.span("generate/0", "generate"):
        clock.now += 1
        with trace.span("generate/1", "generate"):
            clock.now += 1
    metrics = trace.take_step(1)
    assert metrics["pipeline/busy_s/reward"] == 2.0
    assert metrics["pipeline/busy_s/generate"] == 1.5


def test_an_engine_that_never_had_work_counts_as_idle() -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=None)
    for number in range(2):
        trace.expect(f"generate/{number}")
    with trace.span("generate/0", "generate"):
        clock.now += 1
    assert trace.take_step(1)["pipeline/idle_share/generate"] == 0.5


def test_a_span_across_steps_is_divided_between_them() -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=None)
    with trace.span("validation", "validation"):
        clock.now += 2
        assert trace.take_step(1)["pipeline/busy_s/validation"] == 2.0
        clock.now += 1
    assert trace.take_step(2)["pipeline/busy_s/validation"] == 1.0


def test_a_span_that_raised_still_ends() -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=None)
    with pytest.raises(RuntimeError), trace.span("logp", "logp"):
        clock.now += 1
        raise RuntimeError
    clock.now += 1
    assert trace.take_step(1)["pipeline/busy_s/logp"] == 1.0


def test_calls_in_a_row_become_one_event_as_long_as_nothing_changes() -> None:
    clock, sink = Clock(), Events()
    trace = TraceRecorder(clock, sink=sink)
    for version in (1, 1, 1, 2):
        with trace.span("generate/0", "generate", details={"version": version}):
            clock.now += 1
        clock.now += 0.001
    clock.now += 5
    with trace.span("generate/0", "generate", details={"version": 2}):
        clock.now += 1
    trace.close()
    found = [
        (e.details["version"], e.num_calls, round(e.end_s - e.begin_s, 3)) for e in sink.events
    ]
    assert found == [(1, 3, 3.002), (2, 1, 1.0), (2, 1, 1.0)]


def test_memory_is_bounded_over_many_calls() -> None:
    clock, sink = Clock(), Events()
    trace = TraceRecorder(clock, sink=sink)
    for _ in range(10_000):
        with trace.span("generate/0", "generate", details={"version": 1}):
            clock.now += 0.01
    trace.close()
    assert [event.num_calls for event in sink.events] == [10_000]


def record(path: Path, *, resumes: bool = False, closes: bool = True) -> None:
    clock = Clock()
    trace = TraceRecorder(clock, sink=TraceFile(path, clock=clock, resumes=resumes))
    with trace.waiting("actor-train", "batch"):
        clock.now += 1
    with trace.span("actor-train", "update", details={"step": 1}):
        clock.now += 2
    trace.mark("sync", "version in use", details={"version": 1})
    trace.take_step(1)
    if closes:
        trace.close()


def test_the_file_is_chromes_format(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    record(path)
    events = json.loads(path.read_text())
    assert events == read_trace(path)
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    assert set(tracks.values()) == {"actor-train", "actor-train (waits)", "sync", "step"}
    (update,) = [e for e in events if e["name"] == "update"]
    assert (update["ph"], update["ts"], update["dur"]) == ("X", 1e6, 2e6)
    assert update["args"] == {"step": 1, "calls": 1}
    (wait,) = [e for e in events if e["name"] == "wait: batch"]
    assert wait["cat"] == "wait" and tracks[wait["tid"]] == "actor-train (waits)"


def test_a_resumed_run_goes_on_behind_what_is_there_even_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    record(path, closes=False)
    num_killed = len(read_trace(path))
    with path.open("a") as stream:
        stream.write(',\n{"name":"torn')
    record(path, resumes=True)
    events = json.loads(path.read_text())
    assert len(events) > num_killed > 0
    updates = [e["ts"] for e in events if e["name"] == "update"]
    assert len(updates) >= 1 and max(updates) >= 3e6
    record(path, resumes=False)
    assert max(e["ts"] for e in json.loads(path.read_text()) if e["name"] == "update") == 1e6


def test_a_file_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    record(tmp_path)
    assert read_trace(tmp_path) == []


def test_the_file_stops_growing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.metrics.trace.MAX_EVENTS", 50)
    clock, path = Clock(), tmp_path / "trace.json"
    trace = TraceRecorder(clock, sink=TraceFile(path, clock=clock, resumes=False))
    for number in range(500):
        trace.mark("sync", f"mark {number}")
    trace.close()
    assert len(json.loads(path.read_text())) == 50
