# SPDX-License-Identifier: Apache-2.0
"""What a report says of a trace."""

from __future__ import annotations

from pathlib import Path

from tandem.metrics.jsonl import BEFORE_FIRST_STEP, JsonLinesFile
from tandem.metrics.trace import TraceFile, TraceRecorder, read_trace
from tandem.report.report import write_report
from tandem.report.timeline import Timeline, timeline

LAGS = {
    "training/lag/share/lag_0": [(1, 1.0), (2, 0.5)],
    "training/lag/share/lag_1": [(2, 0.5)],
}


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def record(folder: Path, num_steps: int, calls_per_step: int = 1) -> Path:
    """Each step: 2 s wait for a batch while generating, 1 s update, 1 s of nothing."""
    clock, path = Clock(), folder / "trace.json"
    trace = TraceRecorder(clock, sink=TraceFile(path, clock=clock, resumes=False))
    for step in range(1, num_steps + 1):
        with trace.waiting("actor-train", "batch"):
            for call in range(calls_per_step):
                with trace.span("generate/0", "generate", details={"version": step, "call": call}):
                    clock.now += 2 / calls_per_step
        with trace.span("actor-train", "update", details={"step": step}):
            clock.now += 1
        trace.take_step(step)
        clock.now += 1
    trace.close()
    return path


def shown(path: Path) -> Timeline:
    found = timeline(read_trace(path), LAGS)
    assert found is not None
    return found


def test_idle_shares_waits_and_lags_are_of_the_whole_run(tmp_path: Path) -> None:
    found = shown(record(tmp_path, 3))
    # From the first wait to the end of the last update: 3 steps of 4 s without the last second.
    assert {track.name: track.idle for track in found.tracks} == {
        "actor-train": "73 %",
        "generate/0": "45 %",
    }
    assert found.waits == (("actor-train", "batch", "6.0 s", "55 %"),)
    assert found.lags == ((0, 75.0), (1, 25.0))
    assert [name for _, name in found.steps] == ["step 1", "step 2", "step 3"]


def test_bars_show_the_last_steps_in_percent_of_their_time(tmp_path: Path) -> None:
    found = shown(record(tmp_path, 20))
    assert found.seconds == "32.0 s"
    (update,) = [track for track in found.tracks if track.name == "actor-train"]
    assert len(update.bars) == 8
    last = update.bars[-1]
    assert (last.left, last.width) == (96.875, 3.125)
    assert last.title == "update: step 20, 1.0 s" and last.color == 20 % 7
    assert all(bar.left >= 0 and bar.left + bar.width <= 100.1 for bar in update.bars)


def test_a_track_of_very_many_calls_stays_small(tmp_path: Path) -> None:
    found = shown(record(tmp_path, 4, calls_per_step=1000))
    assert max(len(track.bars) for track in found.tracks) <= 400


def test_without_a_trace_there_is_no_timeline(tmp_path: Path) -> None:
    assert timeline(read_trace(tmp_path / "trace.json"), LAGS) is None


def test_the_report_draws_it_and_says_what_was_expected(tmp_path: Path) -> None:
    record(tmp_path, 3)
    metrics = JsonLinesFile(tmp_path / "metrics.jsonl", keep_through_step=BEFORE_FIRST_STEP)
    for step in (1, 2):
        metrics.append({"step": step, "training/lag/share/lag_0": 1.0, "pipeline/wall_s": 4.0})
    metrics.close()
    page = write_report(
        tmp_path, tmp_path / "report.html", forecast=[("step, predicted", "3.9 s")]
    ).read_text()
    for text in ("actor-train for batch", "idle 73 %", "step, predicted", "3.9 s", "<rect"):
        assert text in page
    (tmp_path / "trace.json").unlink()
    assert "<rect" not in write_report(tmp_path, tmp_path / "report.html").read_text()
