# SPDX-License-Identifier: Apache-2.0
"""Metrics as different programs write them."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.metrics.console import console_line
from tandem.metrics.tensorboard_sink import TensorBoardSink
from tandem.report.compare_sources import read_metrics
from tandem.types import StepReport
from tests.unit.report.compare_runs import (
    LOSS,
    REWARD,
    REWARDS_A,
    A,
    Columns,
    write_console,
    write_events,
    write_json,
)


@pytest.mark.parametrize("write", [write_json, write_events, write_console])
def test_every_format_tells_the_same(
    write: Callable[[Path, Columns], Path], tmp_path: Path
) -> None:
    path = write(tmp_path / "run", A)
    files = [path] if path.is_file() else [path, next(path.glob("*"))]
    for place in files:
        columns = read_metrics(place, key="A").columns
        for metric, values in A.items():
            assert list(columns[metric]) == [1, 2, 3, 4, 5, 6]
            assert list(columns[metric].values()) == pytest.approx(values, rel=1e-6)


def test_lines_that_are_no_steps_are_passed_over(tmp_path: Path) -> None:
    columns = read_metrics(write_console(tmp_path / "job.log", A), key="A").columns
    assert set(columns) == {*A, "actor/lr"}


def test_our_own_console_log(tmp_path: Path) -> None:
    reports = [StepReport(step=step, metrics={LOSS: -1.5 * step, "x/y": 1e-7}) for step in (3, 4)]
    log = tmp_path / "console.log"
    log.write_text("\n".join(map(console_line, reports)))
    columns = read_metrics(log, key="A").columns
    assert columns == {LOSS: {3: -4.5, 4: -6.0}, "x/y": {3: 1e-7, 4: 1e-7}}


def test_the_last_value_of_a_step_counts(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    log.write_text("step:2 - a:1\nstep:1 - a:5\nstep:2 - b:1\nstep:2 - a:3\n")
    assert read_metrics(log, key="A").columns == {"a": {1: 5.0, 2: 3.0}, "b": {2: 1.0}}
    for first_step, value in ((1, 1.0), (2, 7.0)):  # a run that went on from step 1
        sink = TensorBoardSink(tmp_path / "events", first_step=first_step)
        for step in range(first_step, 4):
            sink.write(StepReport(step=step, metrics={"a": value}))
        sink.close()
    assert read_metrics(tmp_path / "events", key="A").columns["a"] == {1: 1.0, 2: 7.0, 3: 7.0}


def test_what_is_not_finite_is_kept(tmp_path: Path) -> None:
    columns = {REWARD: [0.5, math.nan, math.inf]}
    for path in (write_json(tmp_path / "json", columns), write_events(tmp_path / "tb", columns)):
        values = read_metrics(path, key="A").columns[REWARD]
        assert [math.isfinite(value) for value in values.values()] == [True, False, False]
    log = tmp_path / "job.log"
    log.write_text("step:1 - a:nan - b:np.float32(inf) - c:np.nan\n")
    read = read_metrics(log, key="A").columns
    assert set(read) == {"a", "b"}
    assert math.isnan(read["a"][1])


def test_a_line_still_being_written_is_no_error(tmp_path: Path) -> None:
    folder = write_json(tmp_path, A)
    with (folder / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 7, "critic/rew')
    assert list(read_metrics(folder, key="A").columns[REWARD].values()) == list(REWARDS_A)


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    def check_refused(name: str, reason: str) -> None:
        with pytest.raises(UserError, match=reason) as raised:
            read_metrics(tmp_path / name, key="B")
        assert str(raised.value).startswith(f"B='{tmp_path / name}': ")

    for name in ("absent", "absent.jsonl", "events.out.tfevents.1"):
        check_refused(name, r"cannot be read \(No such file or directory\)\. Give another")
    (tmp_path / "folder").mkdir()
    check_refused("folder", r"holds neither metrics\.jsonl nor TensorBoard's events")
    (tmp_path / "noise").write_bytes(bytes(range(256)) * 50)
    check_refused("noise", "holds no metrics of any step")
    (tmp_path / "empty.jsonl").touch()
    check_refused("empty.jsonl", "holds no metrics of any step")
    (tmp_path / "torn.tfevents").write_bytes(b"\x18" * 99)
    check_refused("torn.tfevents", "holds no metrics of any step")
    (tmp_path / "bad.jsonl").write_text('nonsense\n{"step": 1}\n')
    with pytest.raises(UserError, match=r"bad\.jsonl: line 1 is not a JSON object"):
        read_metrics(tmp_path / "bad.jsonl", key="B")
