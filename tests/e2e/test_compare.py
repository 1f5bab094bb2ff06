# SPDX-License-Identifier: Apache-2.0
"""``tandem compare`` as a command (A16): what it prints, its exit codes, and mistakes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.fakes.commands import Ended, run_command
from tests.unit.report.compare_runs import (
    LOSS,
    REWARD,
    A,
    B,
    write_console,
    write_events,
    write_json,
)


def _compare(folder: Path, *arguments: Path | str) -> Ended:
    return run_command(["compare", *map(str, arguments)], folder=folder / "here")


def _row(ended: Ended, label: str) -> list[str]:
    """The cells of one row of the table that are not empty."""
    (line,) = [line for line in ended.stdout.splitlines() if line.startswith(label)]
    return re.split(r"  +", line.strip())


def test_a16_runs_that_agree(tmp_path: Path) -> None:
    a, b = write_json(tmp_path / "gpu", A), write_console(tmp_path / "npu.log", B)
    ended = _compare(tmp_path, a, b)
    assert ended.code == 0, ended.stderr
    assert "critic/rewards/mean, 6 common steps (1 to 6)" in ended.stdout
    assert _row(ended, "mean absolute error") == ["mean absolute error", "2 %", "limit 4 %"]
    assert _row(ended, "largest error")[1:] == ["4 %", "at step 4"]
    assert _row(ended, "bias")[1:] == ["+1 %", "mean of B - A"]
    assert _row(ended, "relative error")[1] == "5.714 %"
    assert _row(ended, "throughput, first 4")[1:] == ["250", "125", "0.500", "B / A"]
    assert _row(ended, "throughput, later")[1:4] == ["500", "400", "0.800"]
    assert _row(ended, "total time of steps")[1:] == ["20.0 s", "40.0 s", "0.500", "A / B"]
    assert "The runs agree: the mean absolute error is within the limit." in ended.stdout


def test_a16_runs_that_differ(tmp_path: Path) -> None:
    a = write_events(tmp_path / "gpu", {LOSS: [0.30, 0.31]})
    b = write_json(tmp_path / "npu", {LOSS: [0.33, 0.33]})
    ended = _compare(tmp_path, a, b)
    assert ended.code == 1
    assert _row(ended, "mean absolute error")[1:] == ["2.5 %", "limit 2 %"]
    assert "The runs differ: the mean absolute error exceeds the limit." in ended.stdout
    assert _compare(tmp_path, a, b, "--limit", "2.6").code == 0
    short = write_json(tmp_path / "short", {LOSS: [0.30]})
    assert _row(_compare(tmp_path, a, short), "steps of one run only")[1] == "1"
    broken = write_json(tmp_path / "broken", {LOSS: [0.30, float("nan")]})
    ended = _compare(tmp_path, a, broken)
    assert ended.code == 1
    assert "The runs differ: at some steps A or B is not finite." in ended.stdout


def test_a_constant_reference_shows_no_agreement(tmp_path: Path) -> None:
    zeros = write_json(tmp_path / "zeros", {REWARD: [0.0, 0.0, 0.0]})
    again = write_json(tmp_path / "again", {REWARD: [0.0, 0.0, 0.0]})
    ended = _compare(tmp_path, zeros, again)
    assert ended.code == 2
    assert "Cannot tell: A is constant" in ended.stdout
    assert "agree" not in ended.stdout
    learns = write_json(tmp_path / "learns", {REWARD: [0.0, 0.5, 1.0]})
    assert _compare(tmp_path, zeros, learns).code == 1
    assert _compare(tmp_path, learns, learns).code == 0


def test_a16_the_noise_floor_and_a_picture(tmp_path: Path) -> None:
    a, b = write_json(tmp_path / "a", A), write_json(tmp_path / "b", B)
    again = write_json(tmp_path / "again", {REWARD: [value + 0.005 for value in A[REWARD]]})
    picture = tmp_path / "picture.png"
    ended = _compare(tmp_path, a, b, "--repeat-a", again, "--plot", picture)
    assert ended.code == 0, ended.stderr
    assert _row(ended, "noise, A again")[1:] == ["0.5 %", "error is 4.0 x this"]
    assert ended.stdout.splitlines()[-1] == str(picture)
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize(
    ("second", "options", "says"),
    [
        ("absent", (), ("B='", "absent'", "cannot be read", "Give another file.")),
        ("noise", (), ("B='", "holds no metrics of any step")),
        (
            "losses",
            (),
            ("A='", "do not both log one of critic/rewards/mean, train/loss", "--metric"),
        ),
        ("losses", ("--metric", REWARD), ("B='", "does not log critic/rewards/mean", "--metric")),
        ("later", (), ("have no common step (steps 1 to 6 and steps 7 to 12)",)),
        ("rewards", ("--metric", "perf/throughput"), ("has no published limit", "--limit")),
        ("rewards", ("--limit", "-1"), ("--limit=-1.0", "must be a number from 0 on")),
        ("rewards", ("--limit", "nan"), ("--limit=nan", "must be a number from 0 on")),
        ("rewards", ("--repeat-b", "nowhere"), ("--repeat-b='nowhere'", "cannot be read")),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    second: str, options: tuple[str, ...], says: tuple[str, ...], tmp_path: Path
) -> None:
    first = write_json(tmp_path / "rewards", A)
    write_json(tmp_path / "later", A, first_step=7)
    write_json(tmp_path / "losses", {"train/losses": [1.0]})
    (tmp_path / "noise").write_bytes(bytes(range(256)))
    ended = _compare(tmp_path, first, tmp_path / second, *options)
    assert ended.code == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("error: ")
    for part in says:
        assert part in line
