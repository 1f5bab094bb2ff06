# SPDX-License-Identifier: Apache-2.0
"""Simulated users in child processes whose answers are odd, or never come."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, InteractionSpec, ToolLimits
from tandem.types import AssistantTurn, Observation, ToolStatus
from tests.children.test_tools import FUNCTIONS, in_pool, task, texts, turn

USERS = r"""
import time
from verl.interactions.base import BaseInteraction

ANSWERS = {
    "none": (False, None, 0.0, {}),
    "bytes": (False, b"abc", None, {}),
    "long": (False, "0123456789" * 10_000_000, 0.0, {}),
    "text": "and then?",
    "good": (False, "more", "good", {}),
}

class Plain(BaseInteraction):
    def start_interaction(self, instance_id=None, **kwargs):
        return instance_id

    def generate_response(self, instance_id, messages, **kwargs):
        return False, " ".join(message["content"] for message in messages), 0.0, {}

    def finalize_interaction(self, instance_id, **kwargs):
        return None

class Odd(BaseInteraction):
    async def start_interaction(self, instance_id=None, what="", **kwargs):
        if what == "hang":
            time.sleep(600)

    async def generate_response(self, instance_id, messages, what="", **kwargs):
        if what == "exit":
            raise SystemExit("bad input")
        if what == "surrogate":
            raise ValueError("so happy \ud83d")
        return ANSWERS[what]
"""
ODD_ANSWERS = {
    "none": "",
    "bytes": "abc",
    "long": "the simulated user: ValueError: a message of 100000000 characters fits into no",
    "text": "the simulated user: ValueError: too many values to unpack",
    "good": "the simulated user: ValueError: could not convert string to float: 'good'",
    "exit": "the simulated user: RuntimeError: SystemExit: bad input",
    "surrogate": r"the simulated user: ValueError: so happy \ud83d",
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


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvironmentSetup:
    (tmp_path / "plain_users.py").write_text(USERS)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(str(tmp_path))
    return EnvironmentSetup(
        function_path=str(tmp_path / "functions.py"),
        interactions=(InteractionSpec("plain", "plain_users.Plain", {}),),
    )


def test_users_with_plain_methods_and_rows_with_odd_fields_stop_no_other_episode(
    plain: EnvironmentSetup,
) -> None:
    async def ask_all(pool: EnvironmentPool) -> list[Observation]:
        kwargs = [{"name": "plain"}, {"name": "plain"}, "plain"]
        first, second, odd = (
            pool.open(task(number=i, interaction_kwargs=one)) for i, one in enumerate(kwargs)
        )
        seen = [await one.step(AssistantTurn("a")) for one in (first, second, odd)]
        await first.close()
        return [*seen, await second.step(AssistantTurn("b"))]

    first, second, odd, again = in_pool(plain, ask_all)
    assert texts(first) == texts(second) == ["q a"]
    assert odd.statuses == (ToolStatus.FAILED,) and "AttributeError" in odd.detail
    assert texts(again) == ["q a q a b"]


def test_a_user_reads_turns_that_another_process_has_answered(plain: EnvironmentSetup) -> None:
    async def lose_a_process(pool: EnvironmentPool) -> Observation:
        session = pool.open(task(interaction_kwargs={"name": "plain"}))
        called = replace(turn(("give", {"what": "pid"})), text="call")
        (pid,) = texts(await session.step(called))
        os.kill(int(pid), signal.SIGKILL)
        seen = await session.step(AssistantTurn("a"))
        assert texts(seen) == [f"q call {pid} a"]
        return await session.step(AssistantTurn("b"))

    said = texts(in_pool(plain, lose_a_process))[0]
    assert said.startswith("q call ") and said.count("call") == 2 and said.endswith(" a b")
