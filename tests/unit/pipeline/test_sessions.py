# SPDX-License-Identifier: Apache-2.0
"""Conversations of programs become samples: drawn tokens are kept, rewritten ones fork (M24)."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tandem.agents.chat import RequestRefused
from tandem.data.routes import routes_of
from tandem.data.span_tree import rows_of
from tandem.data.tokenizer import TextCodec
from tandem.pipeline.episodes import outcome_of_end
from tandem.pipeline.sessions import LANE, _cut_at_stop
from tandem.types import (
    Completion,
    EpisodeEnd,
    FinishReason,
    RewardStatus,
    Span,
    Trajectory,
)
from tests.fakes.made_tokenizers import codec_for
from tests.fakes.played_programs import QWEN, SAMPLE, USER, Agent, Program, check_tokens, play

LOOK: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "d",
        "parameters": {"type": "object", "properties": {"what": {"type": "string"}}},
    },
}
CALL = '<tool_call>\n{"name": "look", "arguments": {"what": "x"}}\n</tool_call><|im_end|>'


def end_of(trajectory: Trajectory) -> tuple[EpisodeEnd, tuple[str, ...], str]:
    assert trajectory.episode is not None
    return trajectory.episode.end, trajectory.episode.forks, trajectory.episode.detail


async def play_with_tool(agent: Agent) -> dict[str, float]:
    messages: list[Any] = [USER]
    for _ in range(3):
        said = await agent.ask(messages, tools=[LOOK])
        messages.append(said)
        for call in said.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "seen"})
        if "tool_calls" not in said:
            return {"reward": 0.5, "steps": 2.0}
    raise RuntimeError("too many turns")


def test_m24_a_conversation_that_goes_on_keeps_the_drawn_tokens() -> None:
    trajectory, rollout = play(play_with_tool, " hm " + CALL, CALL, "It is 42.<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, (), "")
    assert trajectory.parents == () and len(trajectory.completions) == 3
    check_tokens(trajectory, rollout)
    assert [request.first_index > 0 for request in rollout.requests] == [False, True, True]
    assert rollout.forgotten == [SAMPLE]
    record = trajectory.episode
    assert record is not None and outcome_of_end(trajectory) is None
    assert (record.num_turns, record.rewards) == (6, (0.5,))
    ids = [call["id"] for m in record.messages for call in m.get("tool_calls", ())]
    assert ids == ["c00000000", "c00000001"], "ids are unique in a conversation"
    expected = QWEN.decode([trajectory.response_spans[1].token_ids], skip_special=False)[0]
    assert "<tool_response>\nseen\n</tool_response>" in expected


def test_the_reward_of_an_agent_is_that_of_its_sample_if_it_gives_one() -> None:
    trajectory, _ = play(play_with_tool, "Done.<|im_end|>", gives_reward=True)
    outcome = outcome_of_end(trajectory)
    assert outcome is not None
    assert (outcome.status, outcome.score) == (RewardStatus.VALUE, 0.5)
    assert outcome.extra == {"steps": 2.0}


def asks(*conversations: Sequence[Any], **fields: Any) -> Program:
    """Return a program that asks for a turn of each conversation; "SAID" is the turn before."""

    async def program(agent: Agent) -> None:
        said: dict[str, Any] = {}
        for messages in conversations:
            filled = [_fill(message, said) for message in messages]
            said = await agent.ask(filled, **fields)

    return program


def _fill(message: Any, said: dict[str, Any]) -> Any:
    return message(said) if callable(message) else message


def same(said: dict[str, Any]) -> dict[str, Any]:
    return said


def shouted(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "content": str(said["content"]).upper()}


def unthinking(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "content": str(said["content"]).rpartition("</think>")[2]}


def padded(said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "content": f"\n{said['content']} "}


MORE = {"role": "user", "content": "and 2?"}
THOUGHT = "<think>hm</think>It is 1.<|im_end|>"
FORKS: list[tuple[list[list[Any]], tuple[str, ...], int]] = [
    ([[USER], [USER, same, MORE]], (), 1),
    ([[USER], [USER, padded, MORE]], (), 1),
    ([[USER], [USER, shouted, MORE]], ("edited",), 2),
    ([[USER], [USER, unthinking, MORE]], ("reasoning",), 2),
    ([[USER], [USER, MORE]], ("compacted",), 2),
    ([[USER], [USER]], ("resampled",), 2),
    ([[USER], [{"role": "system", "content": "s"}, USER]], ("separate",), 2),
    ([[USER], [USER, same, MORE], [USER, same, MORE]], ("resampled",), 2),
]


@pytest.mark.parametrize(("conversations", "reasons", "num_rows"), FORKS)
def test_a_rewritten_history_forks_with_its_reason(
    conversations: list[list[Any]], reasons: tuple[str, ...], num_rows: int
) -> None:
    turns = [THOUGHT] * len(conversations)
    trajectory, rollout = play(asks(*conversations), *turns, codec=codec_for("qwen3"))
    assert end_of(trajectory) == (EpisodeEnd.DONE, reasons, "")
    assert len(rows_of(trajectory)) == num_rows
    assert len(trajectory.completions) == len(conversations)
    check_tokens(trajectory, rollout)


def test_other_tools_are_a_fork() -> None:
    async def program(agent: Agent) -> None:
        said = await agent.ask([USER], tools=[LOOK])
        await agent.ask([USER, said, MORE])

    trajectory, rollout = play(program, "a<|im_end|>", "b<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, ("tools_changed",), "")
    check_tokens(trajectory, rollout)


@pytest.mark.parametrize("rewrites", [True, False])
def test_m25_a_stop_text_ends_the_turn_at_its_token_and_may_be_written_behind_it(
    rewrites: bool,
) -> None:
    async def program(agent: Agent) -> None:
        said = await agent.ask([USER], stop=["</code>", "Observation:"])
        assert said["content"] == "x = 1"
        if rewrites:
            said["content"] += "</code>"
        await agent.ask([USER, said, MORE], stop=["</code>"])

    trajectory, rollout = play(program, "x = 1</code> and more<|im_end|>", "b<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, (), "")
    first, _ = trajectory.completions
    assert len(first.token_ids) == len(first.log_probs) < len(rollout.completions[0].token_ids)
    text = QWEN.decode([first.token_ids], skip_special=False)[0]
    assert "</code>" in text and "</code>" not in QWEN.decode([first.token_ids[:-1]])[0]
    given = QWEN.decode([trajectory.response_spans[1].token_ids], skip_special=False)[0]
    assert given.startswith("<|im_end|>\n<|im_start|>user\nand 2?")
    assert "and more" not in QWEN.decode([trajectory.response_ids])[0]


def test_a_turn_that_is_cut_at_a_stop_text_keeps_the_routes_of_its_tokens() -> None:
    prompt, ids = array("i", [1, 2, 3]), array("i", QWEN.encode(["x = 1</code> and more"])[0])
    routes = np.array([*prompt, *ids[:-1]])[:, None, None]
    log_probs = array("f", [-0.5] * len(ids))
    drawn = Completion(SAMPLE, ids, log_probs, FinishReason.LENGTH, 0, routes=routes)
    cut, stop = _cut_at_stop(drawn, ("</code>",), decode=lambda x: QWEN.decode([x])[0])
    assert stop == "</code>" and len(cut.token_ids) < len(ids)
    found = routes_of(Trajectory(SAMPLE, (Span(prompt), Span(cut.token_ids, cut))))
    assert found is not None
    assert found.ravel().tolist() == [*prompt, *cut.token_ids[:-1]]


def test_requests_at_the_same_time_are_branches_with_random_numbers_of_their_own() -> None:
    async def program(agent: Agent) -> None:
        await asyncio.gather(agent.ask([USER]), agent.ask([USER]))

    trajectory, rollout = play(program, "a<|im_end|>", "b<|im_end|>")
    assert [request.sample_ids for request in rollout.requests] == [(SAMPLE,), (SAMPLE + LANE,)]
    assert [request.continues for request in rollout.requests] == [True, False]
    assert len(rows_of(trajectory)) == 2
    assert {one.sample_id for one in trajectory.completions} == {SAMPLE}


SYSTEM = {"role": "system", "content": "s"}
PARALLEL: list[tuple[list[Any], dict[str, Any], tuple[str, ...]]] = [
    ([USER], {}, ("resampled", "resampled")),
    ([SYSTEM, USER], {}, ("separate", "resampled")),
    ([SYSTEM, USER], {"tools": [LOOK]}, ("separate", "resampled")),
    ([USER], {"tools": [LOOK]}, ("tools_changed", "resampled")),
    ([USER, MORE], {}, ("compacted", "resampled")),
]


@pytest.mark.parametrize(("messages", "fields", "reasons"), PARALLEL)
def test_a_request_at_the_time_of_the_first_one_forks_with_its_reason(
    messages: list[Any], fields: dict[str, Any], reasons: tuple[str, ...]
) -> None:
    """The third request is sent when the first two have their turns; it is the first once more."""

    async def program(agent: Agent) -> None:
        await asyncio.gather(agent.ask([USER]), agent.ask(messages, **fields))
        await agent.ask([USER])

    trajectory, rollout = play(program, "a<|im_end|>", "b<|im_end|>", "c<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, reasons, "")
    assert len(rows_of(trajectory)) == 3
    check_tokens(trajectory, rollout)


def test_requests_at_the_same_time_share_the_budget_of_the_episode() -> None:
    """Of three with up to 5 tokens each, two fit into 12 at once, and the third gets the rest."""
    refused: list[str] = []

    async def program(agent: Agent) -> None:
        rollout: Any = agent.session._rollout
        rollout.is_held.clear()
        asking = [asyncio.create_task(agent.ask([USER], max_tokens=5)) for _ in range(3)]
        asking += [asyncio.create_task(agent.ask([USER]))]
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(rollout.requests) == 2
        rollout.is_held.set()
        await asyncio.gather(*asking[:3])
        try:
            await asking[3]
        except RequestRefused as error:
            refused.append(str(error))

    text = "It is forty-two, I think, or more.<|im_end|>"
    trajectory, rollout = play(program, text, text, text, budget=12)
    assert [one.sampling.max_new_tokens for one in rollout.requests] == [5, 5, 2]
    assert trajectory.num_drawn_tokens == 12
    assert end_of(trajectory)[0] is EpisodeEnd.LENGTH and "no room for a turn" in refused[0]


def test_m24_a_request_that_is_repeated_gets_the_same_turn_once() -> None:
    async def program(agent: Agent) -> None:
        lost = agent.begin([USER])
        lost.hang_up()
        first = await agent.ask([USER])
        again = await agent.ask([USER], num_retries=1)
        assert first == again

    trajectory, rollout = play(program, "a<|im_end|>")
    assert len(rollout.requests) == 1 and len(trajectory.completions) == 1
    assert end_of(trajectory) == (EpisodeEnd.DONE, (), "")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_m24_of_equal_requests_the_one_that_is_repeated_gets_its_own_turn(place: int) -> None:
    """A client gives up while two others wait or have their turns; it sends its request again."""

    async def program(agent: Agent) -> None:
        drawings = [agent.begin([USER]) for _ in range(3)]
        lost = drawings.pop(place)
        await drawings[0].reply()
        drawings[0].confirm()
        lost.hang_up()
        again = agent.begin([USER], num_retries=1)
        assert again is lost
        again.hang_up()
        for one in (agent.begin([USER], num_retries=2), drawings[1]):
            await one.reply()
            one.confirm()

    trajectory, rollout = play(program, *(f"{word}<|im_end|>" for word in ("a", "b", "c")))
    assert len(rollout.requests) == len(trajectory.completions) == 3
    check_tokens(trajectory, rollout)


def test_m24_a_repeated_request_whose_turn_is_unknown_gets_no_turn_of_another_request() -> None:
    """Its client is gone, which nobody has noticed, and two equal requests may be its own."""

    async def program(agent: Agent) -> None:
        first = agent.begin([USER])
        assert agent.begin([USER], num_retries=1) is first, "the only one"
        second = agent.begin([USER], num_retries=1)
        assert second is not first, "the first has been sent again once, and this is no second time"
        await first.reply()
        first.confirm()
        assert agent.begin([USER], num_retries=2) is second, "the other client has its turn"
        await second.reply()
        second.confirm()
        third = agent.begin([USER], num_retries=3)
        assert third not in (first, second)
        await third.reply()
        third.confirm()

    trajectory, _ = play(program, *(f"{word}<|im_end|>" for word in ("a", "b", "c")))
    assert len(trajectory.completions) == 3


def test_m24_a_turn_that_a_second_request_waits_for_is_not_lost_when_the_first_hangs_up() -> None:
    async def program(agent: Agent) -> None:
        first = agent.begin([USER])
        again = agent.begin([USER], num_retries=1)
        first.hang_up()
        assert agent.begin([USER]) is not again

    play(program, "a<|im_end|>", "b<|im_end|>")


def test_m24_a_turn_that_the_agent_never_got_is_not_trained_on() -> None:
    async def program(agent: Agent) -> None:
        said = await agent.ask([USER])
        lost = agent.begin([USER, said, MORE])
        await lost.reply()
        lost.hang_up()

    trajectory, _ = play(program, "a<|im_end|>", "b<|im_end|>")
    assert len(trajectory.completions) == 1
    assert [span.completion is not None for span in trajectory.spans] == [False, True]
    record = trajectory.episode
    assert record is not None and record.num_turns == 2
    assert list(record.messages) == [USER, {"role": "assistant", "content": "a"}]


async def never(agent: Agent) -> None:
    pass


async def stumble(agent: Agent) -> None:
    await agent.ask([USER])
    raise RuntimeError("KeyError: 'x' (agent.py:3)")


async def linger(agent: Agent) -> None:
    await agent.ask([USER])
    await asyncio.sleep(60)


async def demand(agent: Agent) -> None:
    await agent.ask([USER], n=2)


FAULTS: list[tuple[Program, str, EpisodeEnd, str]] = [
    (never, "a", EpisodeEnd.FAILED, "the agent ended without a turn of the policy"),
    (stumble, "a", EpisodeEnd.FAILED, "the agent: KeyError: 'x' (agent.py:3)"),
    (linger, "a", EpisodeEnd.DEADLINE, "the episode took longer than 0.3 s"),
    (stumble, "NAN", EpisodeEnd.FAILED, "the generation failed: its logits are not finite"),
    (demand, "a", EpisodeEnd.FAILED, "the agent: n=2 is not supported"),
]


@pytest.mark.parametrize(("program", "turn", "end", "detail"), FAULTS)
def test_a_program_that_fails_is_no_evidence_about_the_policy(
    program: Program, turn: str, end: EpisodeEnd, detail: str
) -> None:
    trajectory, rollout = play(program, turn, timeout_s=0.3)
    assert trajectory.episode is not None
    assert trajectory.episode.end is end and trajectory.episode.detail.startswith(detail)
    outcome = outcome_of_end(trajectory)
    assert outcome is not None and outcome.status is not RewardStatus.VALUE
    assert all(one.weights_version == rollout.version for one in trajectory.completions)
    assert rollout.forgotten == [SAMPLE]


def test_an_agent_that_should_give_a_reward_and_gives_none_has_failed() -> None:
    async def program(agent: Agent) -> None:
        await agent.ask([USER])

    trajectory, _ = play(program, "a<|im_end|>", gives_reward=True)
    end, _, detail = end_of(trajectory)
    assert end is EpisodeEnd.FAILED and detail.startswith("the agent gave no reward")


LIMITS: list[tuple[dict[str, Any], EpisodeEnd, str]] = [
    ({"max_assistant_turns": 1}, EpisodeEnd.TURNS, "has had its 1 turns"),
    ({"budget": 12}, EpisodeEnd.LENGTH, "there is no room for a turn"),
    ({"max_prompt_tokens": 8, "budget": 40}, EpisodeEnd.LENGTH, "there is no room for a turn"),
]


@pytest.mark.parametrize(("limits", "end", "message"), LIMITS)
def test_a_bound_is_told_to_the_agent_and_the_episode_is_scored(
    limits: dict[str, Any], end: EpisodeEnd, message: str
) -> None:
    async def program(agent: Agent) -> None:
        said = await agent.ask([USER])
        with pytest.raises(RequestRefused, match=message):
            await agent.ask([USER, said, {"role": "user", "content": "and " * 30}])
        raise RuntimeError("the client raised BadRequestError")

    trajectory, rollout = play(program, "It is forty-two, I think.<|im_end|>", **limits)
    assert end_of(trajectory)[0] is end and outcome_of_end(trajectory) is None
    assert len(rollout.requests) == 1


@pytest.mark.parametrize("ends_well", [True, False])
def test_an_agent_that_goes_on_after_a_refusal_is_judged_by_how_it_ends(ends_well: bool) -> None:
    """It shortens its history and gets a turn; an error after that is one of its own."""

    async def program(agent: Agent) -> None:
        said = await agent.ask([USER], max_tokens=3)
        with pytest.raises(RequestRefused) as caught:
            await agent.ask([USER, said, {"role": "user", "content": "web page " * 2000}])
        assert caught.value.code == "context_length_exceeded"
        await agent.ask([USER, said, MORE], max_tokens=3)
        if not ends_well:
            raise RuntimeError("KeyError: 'x' (agent.py:9)")

    trajectory, _ = play(program, "one<|im_end|>", "two<|im_end|>")
    found = (EpisodeEnd.DONE, (), "")
    if not ends_well:
        found = (EpisodeEnd.FAILED, (), "the agent: KeyError: 'x' (agent.py:9)")
    assert end_of(trajectory) == found


def test_a_turn_that_began_before_a_refusal_does_not_clear_it() -> None:
    async def program(agent: Agent) -> None:
        early = agent.begin([USER], max_tokens=3)
        with pytest.raises(RequestRefused):
            await agent.ask([{"role": "user", "content": "web page " * 2000}])
        await early.reply()
        early.confirm()
        raise RuntimeError("the client raised BadRequestError")

    trajectory, _ = play(program, "one<|im_end|>")
    assert end_of(trajectory)[0] is EpisodeEnd.LENGTH and outcome_of_end(trajectory) is None


def test_a_conversation_without_room_is_refused_before_it_is_encoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Encoding blocks the run, and an agent may send tens of megabytes."""

    async def program(agent: Agent) -> None:
        said = await agent.ask([USER])
        with monkeypatch.context() as patch:
            patch.setattr(TextCodec, "encode", note)
            with pytest.raises(RequestRefused, match="more than 700 tokens") as caught:
                await agent.ask([USER, said, {"role": "user", "content": "x" * 40_000_000}])
        assert caught.value.code == "context_length_exceeded"

    def note(codec: TextCodec, texts: Sequence[str]) -> Any:
        raise AssertionError("it is encoded")

    trajectory, _ = play(program, "a<|im_end|>", budget=100)
    assert end_of(trajectory)[0] is EpisodeEnd.LENGTH and outcome_of_end(trajectory) is None


def test_max_tokens_of_a_request_bounds_its_turn() -> None:
    async def program(agent: Agent) -> None:
        drawing = agent.begin([USER], max_tokens=3, logprobs=True)
        reply = await drawing.reply()
        drawing.confirm()
        assert reply.finish_reason is FinishReason.LENGTH and len(reply.tokens) == 3

    trajectory, rollout = play(program, "It is forty-two.<|im_end|>")
    assert trajectory.num_drawn_tokens == 3
    assert rollout.requests[0].sampling.max_new_tokens == 3


def test_malformed_calls_are_text_as_other_servers_show_them() -> None:
    async def program(agent: Agent) -> None:
        said = await agent.ask([USER], tools=[LOOK])
        assert said["content"] == "<tool_call>\n{\n</tool_call>" and "tool_calls" not in said
        await agent.ask([USER, said, MORE], tools=[LOOK])

    trajectory, _ = play(program, "<tool_call>\n{\n</tool_call><|im_end|>", "b<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, (), "")


def test_a_call_with_a_lone_surrogate_goes_on_as_the_agent_restates_it() -> None:
    trajectory, _ = play(play_with_tool, CALL.replace('"x"', r'"\ud83d"'), "It is 42.<|im_end|>")
    assert end_of(trajectory) == (EpisodeEnd.DONE, (), "")


def test_a_template_without_calls_is_refused_and_fails_the_episode() -> None:
    async def program(agent: Agent) -> None:
        await agent.ask([USER], tools=[LOOK])

    trajectory, _ = play(program, "a", codec=codec_for("llama3"))
    assert end_of(trajectory)[2] == "the chat template drops the calls of a turn"
