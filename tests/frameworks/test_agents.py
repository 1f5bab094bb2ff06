# SPDX-License-Identifier: Apache-2.0
"""Agents of frameworks, unchanged, against the endpoint and a policy with given turns (M25).

smolagents and langgraph are no dependencies of tandem: ``make test-frameworks`` installs them into
an environment of their own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tandem.agents.endpoint import open_endpoint
from tandem.agents.setup import Access
from tandem.data.span_tree import rows_of
from tandem.pipeline.sessions import ProgramSession
from tandem.types import EpisodeEnd, EpisodeRecord, GenerationRequest, SamplingParams, Trajectory
from tests.fakes.played_programs import (
    QWEN,
    SAMPLE,
    ScriptedRollout,
    conversing_of,
)

smolagents = pytest.importorskip("smolagents", reason="needs smolagents: make test-frameworks")
prebuilt = pytest.importorskip("langgraph.prebuilt", reason="needs langgraph: make test-frameworks")
langchain = pytest.importorskip("langchain_openai", reason="needs langgraph: make test-frameworks")
NAMED: list[str] = []


def converse(ask: Callable[[Access], Any], *turns: str) -> tuple[Trajectory, Any]:
    """Let a program of a thread talk to a policy that draws ``turns``."""

    async def main() -> tuple[Trajectory, ScriptedRollout, Any]:
        rollout = ScriptedRollout(turns, QWEN)
        engine: Any = rollout
        request = GenerationRequest((SAMPLE,), (1, 2), SamplingParams(1.0, 1.0, -1, 4000))
        conversing = conversing_of(QWEN, max_prompt_tokens=60_000)
        session = ProgramSession(request, conversing=conversing, rollout=engine)
        async with (
            asyncio.timeout(120),
            open_endpoint(("127.0.0.1", 0), name_once=NAMED.append) as endpoint,
        ):
            answer = await asyncio.to_thread(ask, endpoint.admit(session))
            await session.close()
        assert not session.failure and not session.refusal
        return session.trajectory(EpisodeRecord(EpisodeEnd.DONE)), rollout, answer

    trajectory, rollout, answer = asyncio.run(main())
    drawn = zip(trajectory.completions, rollout.completions, strict=True)
    for ours, theirs in drawn:
        assert ours.token_ids == theirs.token_ids[: len(ours.token_ids)], "ids are those drawn"
    return trajectory, answer


def call(name: str, **arguments: Any) -> str:
    described = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{described}\n</tool_call><|im_end|>"


def forks_of(trajectory: Trajectory) -> tuple[str, ...]:
    assert trajectory.episode is not None
    return trajectory.episode.forks


def test_m25_smolagents_rewrites_calls_as_text_which_is_a_fork() -> None:
    """Its ToolCallingAgent restates a call as text behind "Calling tools:"."""

    @smolagents.tool
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b

    def ask(access: Access) -> Any:
        model = smolagents.OpenAIModel("policy", api_base=access.base_url, api_key=access.api_key)
        agent = smolagents.ToolCallingAgent(tools=[multiply], model=model, verbosity_level=0)
        return agent.run("What is 6 times 7?")

    trajectory, answer = converse(
        ask, call("multiply", a=6, b=7), call("final_answer", answer="42")
    )
    assert str(answer) == "42" and len(trajectory.completions) == 2
    assert forks_of(trajectory) == ("edited",) and len(rows_of(trajectory)) == 2


def test_m25_smolagents_writes_code_with_stop_texts() -> None:
    def ask(access: Access) -> Any:
        model = smolagents.OpenAIModel("policy", api_base=access.base_url, api_key=access.api_key)
        agent = smolagents.CodeAgent(tools=[], model=model, verbosity_level=0)
        return agent.run("What is 6 times 7?")

    first = "Thought: I multiply.\n<code>\nx = 6 * 7\nprint(x)\n</code> and so on<|im_end|>"
    second = "Thought: done.\n<code>\nfinal_answer(x)\n</code><|im_end|>"
    trajectory, answer = converse(ask, first, second)
    assert str(answer) == "42" and len(trajectory.completions) == 2
    assert forks_of(trajectory) == () and len(rows_of(trajectory)) == 1
    assert "and so on" not in QWEN.decode([trajectory.response_ids])[0]


def test_m25_langgraph_goes_on_without_a_fork() -> None:
    def multiply(a: int, b: int) -> int:
        """Multiply two numbers."""
        return a * b

    def ask(access: Access) -> Any:
        model = langchain.ChatOpenAI(
            model="policy", base_url=access.base_url, api_key=access.api_key, temperature=0
        )
        agent = prebuilt.create_react_agent(model, [multiply])
        question = {"messages": [("user", "What is 6 times 7, times 2?")]}
        return agent.invoke(question)["messages"][-1].content

    trajectory, answer = converse(
        ask, call("multiply", a=6, b=7), call("multiply", a=42, b=2), "It is 84.<|im_end|>"
    )
    assert answer == "It is 84."
    assert forks_of(trajectory) == () and len(rows_of(trajectory)) == 1
    assert len(trajectory.completions) == 3
