# SPDX-License-Identifier: Apache-2.0
"""Simulated users in child processes whose answers are odd, or never come."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, InteractionSpec, ToolLimits
from tandem.types import AssistantTurn, Observation, ToolStatus
from tests.children.test_tools import in_pool, task, texts

USERS = """
import time
from verl.interactions.base import BaseInteraction

ANSWERS = {
    "none": (False, None, 0.0, {}),
    "bytes": (False, b"abc", None, {}),
    "long": (False, "0123456789" * 10_000_000, 0.0, {}),
    "text": "and then?",
    "good": (False, "more", "good", {}),
}

class Odd(BaseInteraction):
    async def start_interaction(self, instance_id=None, what="", **kwargs):
        if what == "hang":
            time.sleep(600)

    async def generate_response(self, instance_id, messages, what="", **kwargs):
        return ANSWERS[what]
"""
ODD_ANSWERS = {
    "none": "",
    "bytes": "abc",
    "long": "the simulated user: ValueError: a message of 100000000 characters fits into no",
    "text": "the simulated user: ValueError: too many values to unpack",
    "good": "the simulated user: ValueError: could not convert string to float: 'good'",
    "hang": "no answer within 6 s",
}


def test_what_a_user_says_is_text_and_all_else_is_a_failure_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user whose answer is odd or never comes takes no other episode with it."""
    (tmp_path / "odd_users.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(tmp_path))
    setup = EnvironmentSetup(
        interactions=(InteractionSpec("odd", "odd_users.Odd", {}),),
        limits=ToolLimits(timeout_s=1.0),
    )

    async def ask_all(pool: EnvironmentPool) -> dict[str, Observation]:
        kwargs = [{"name": "odd", "what": what} for what in ODD_ANSWERS]
        sessions = [pool.open(task(number=i, interaction_kwargs=k)) for i, k in enumerate(kwargs)]
        seen = [await session.step(AssistantTurn("hi")) for session in sessions]
        for session in sessions:
            await session.close()
        return dict(zip(ODD_ANSWERS, seen, strict=True))

    for what, one in in_pool(setup, ask_all).items():
        has_failed = one.statuses == (ToolStatus.FAILED,)
        assert has_failed == (what not in ("none", "bytes")), (what, one)
        found = one.detail if has_failed else texts(one)[0]
        assert found.startswith(ODD_ANSWERS[what]) and "\n" not in found, (what, found)
