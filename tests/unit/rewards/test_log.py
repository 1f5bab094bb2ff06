# SPDX-License-Identifier: Apache-2.0
"""The first lines of a reward log among the messages of the run."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.rewards.log import LoggedRewards
from tandem.types import RewardOutcome, RewardRequest


class Talkative:
    """A scorer that prints 8 lines and begins another."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        with self._path.open("a") as file:
            file.writelines(f"line {number}\n" for number in range(8))
            file.write("half ")
        return []


def test_ten_new_lines_are_shown_and_then_the_path(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "tandem.rewards.log")
    path = tmp_path / "rewards.log"
    path.write_text("of an earlier start\n")
    rewards = LoggedRewards(Talkative(path), path)
    for _ in range(3):
        asyncio.run(rewards.score([]))
    shown = [record.getMessage() for record in caplog.records]
    assert shown[:8] == [f"line {number}" for number in range(8)]
    assert shown[8:10] == ["half line 0", "line 1"]
    assert shown[10:] == [f"further output of the reward functions is in {path}"]


def test_silent_functions_leave_no_log(tmp_path: Path) -> None:
    class Silent:
        async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
            return []

    path = tmp_path / "rewards.log"
    assert asyncio.run(LoggedRewards(Silent(), path).score([])) == []
    assert not path.exists()
