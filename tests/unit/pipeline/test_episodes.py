# SPDX-License-Identifier: Apache-2.0
"""Episodes with a scripted policy and real tools: spans, masks, ends, and whose fault it is.

M4, M6, M13 to M16 of the specification of agents, as far as they are about one episode.
"""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import EnvironmentSetup, Task, ToolLimits
from tandem.data.call_formats import CALL_FORMATS
from tandem.data.span_tree import rows_of
from tandem.data.tokenizer import TextCodec
from tandem.metrics.episodes import episode_metrics
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.batch import lay_out
from tandem.pipeline.conversing import Conversing, TurnLimits
from tandem.pipeline.episodes import EpisodePlayer, outcome_of_end, reward_context
from tandem.pipeline.producer import decode_drawn
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.types import (
    AssistantTurn,
    Completion,
    EpisodeEnd,
    FinishReason,
    GenerationRequest,
    Group,
    Observation,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    SamplingParams,
    ToolStatus,
    Trajectory,
)
from tests.fakes.made_tokenizers import codec_for

CODEC = codec_for("qwen2_5")
TOOLS = '''
import time
from tandem.agents.verl_names import function_tool

@function_tool
def look(what: str) -> str:
    """Look.

    Args:
        what: At what.
    """
    if what == "fail":
        raise OSError("no connection")
    if what == "slow":
        time.sleep(60)
    if what == "long":
        return "x" * 20_000_000
    return "#### 42" if what == "answer" else what
'''
CALL = '<tool_call>\n{{"name": "look", "arguments": {{"what": "{}"}}}}\n</tool_call><|im_end|>'
BETWEEN = (
    "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
)
VERSION = 3


class ScriptedRollout:
    """A policy that draws given texts; it checks that each prompt holds all tokens before."""

    version = VERSION

    def __init__(
        self, turns: Sequence[str], *, codec: TextCodec = CODEC, must_append: bool = True
    ) -> None:
        self._turns = iter(turns)
        self._codec, self._must_append = codec, must_append
        self._known: list[int] = []
        self.requests: list[GenerationRequest] = []
        self.forgotten: list[int] = []

    def submit_apart(self, request: GenerationRequest) -> list[asyncio.Future[Any]]:
        (sample_id,) = request.sample_ids
        prompt = list(request.prompt_ids)
        assert prompt[: len(self._known)] == self._known or not self._must_append
        self.requests.append(request)
        ids = self._codec.encode([next(self._turns)])[0][: request.sampling.max_new_tokens]
        self._known = prompt + ids
        reason = FinishReason.STOP if ids[-1] in self._codec.eos_ids else FinishReason.LENGTH
        log_probs = array("f", [-0.5] * len(ids))
        done = asyncio.get_running_loop().create_future()
        done.set_result((Completion(sample_id, array("i", ids), log_probs, reason, VERSION),))
        return [done]

    async def forget(self, sample_ids: Sequence[int]) -> None:
        self.forgotten += sample_ids


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory) -> EnvironmentSetup:
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    limits = ToolLimits(max_characters=1000, timeout_s=30.0)
    return EnvironmentSetup(function_path=str(file), limits=limits)


def prompt_of(text: str = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n") -> Prompt:
    messages = [{"role": "user", "content": "q"}]
    ids = tuple(CODEC.encode([text])[0])
    return Prompt(7, 0, ids, text, "s", "42", {"index": 1}, messages=messages, agent="tool_agent")


def play(
    setup: EnvironmentSetup, *turns: str, budget: int = 200, **limits: Any
) -> tuple[Trajectory, ScriptedRollout]:
    rollout = ScriptedRollout(turns)
    prompt = prompt_of()
    known: Mapping[str, Any] = {
        "max_assistant_turns": None,
        "max_user_turns": None,
        "timeout_s": 60.0,
        **limits,
    }

    async def main() -> Trajectory:
        variables = dict(os.environ)
        async with EnvironmentPool(setup, num_processes=1, environment=variables) as pool:
            schemas = {one["function"]["name"]: one for one in await pool.start()}
            conversing = Conversing(
                CODEC, pool, CALL_FORMATS["hermes"], schemas, TurnLimits(**known)
            )
            trace = TraceRecorder(lambda: 0.0, sink=None)
            engine: Any = rollout
            player = EpisodePlayer(engine, conversing, trace=trace)
            sampling = SamplingParams(1.0, 1.0, -1, budget)
            request = GenerationRequest((56,), prompt.token_ids, sampling)
            (answers,) = player.start([prompt], [request])
            (trajectory,) = await answers
            return trajectory

    return asyncio.run(main()), rollout


def text_of(ids: Sequence[int]) -> str:
    return CODEC.decode([ids], skip_special=False)[0]


def test_m4_spans_masks_and_columns_of_an_episode_with_two_calls(setup: EnvironmentSetup) -> None:
    said = [CALL.format("one"), CALL.format("two"), "It is 2.<|im_end|>"]
    given = [BETWEEN.format("one"), BETWEEN.format("two")]
    trajectory, rollout = play(setup, *said)
    expected = [said[0], given[0], said[1], given[1], said[2]]
    assert [text_of(span.token_ids) for span in trajectory.response_spans] == expected
    lengths = [len(span.token_ids) for span in trajectory.response_spans]
    mask = [i % 2 == 0 for i, length in enumerate(lengths) for _ in range(length)]
    assert list(trajectory.loss_mask or ()) == mask
    assert [request.first_index for request in rollout.requests] == [
        0,
        sum(lengths[:2]),
        sum(lengths[:4]),
    ]
    budgets = [request.sampling.max_new_tokens for request in rollout.requests]
    assert budgets == [200, 200 - sum(lengths[:2]), 200 - sum(lengths[:4])]
    assert rollout.forgotten == [56]
    record = trajectory.episode
    assert record is not None
    assert (record.end, record.num_turns) == (EpisodeEnd.ANSWER, 6)
    assert [message["role"] for message in record.messages] == [
        "assistant",
        "tool",
        "assistant",
        "tool",
        "assistant",
    ]
    sample = Sample(trajectory, "", RewardOutcome(RewardStatus.VALUE, 1.0))
    batch = lay_out([Group(prompt_of(), (sample,))], version=VERSION + 1)
    num_drawn = sum(mask)
    assert torch.equal(batch.rollout_logp_R, torch.full((num_drawn,), -0.5))
    assert batch.lag_R.tolist() == [1] * num_drawn
    assert batch.sequences[0].prompt_key == 7, "the prompt is shared with the other samples"


def test_m16_what_a_tool_writes_is_never_scored(setup: EnvironmentSetup) -> None:
    trajectory, _ = play(setup, CALL.format("answer"), "#### 7<|im_end|>")
    context: Any = type("Context", (), {"codec": CODEC})
    (text,) = decode_drawn(context, [trajectory])
    assert text.endswith("\n#### 7") and "42" not in text
    assert "42" in text_of(trajectory.response_ids), "scoring all tokens must be seen to differ"
    info = reward_context(prompt_of(), trajectory)
    assert info["index"] == 1 and info["num_turns"] == 4
    assert info["messages"][1]["content"] == "#### 42"


def test_a_malformed_call_is_answered_and_does_not_end_the_episode(setup: EnvironmentSetup) -> None:
    trajectory, _ = play(setup, "<tool_call>\n{\n</tool_call><|im_end|>", "Well.<|im_end|>")
    assert trajectory.episode is not None
    assert trajectory.episode.statuses == (ToolStatus.MODEL_ERROR,)
    assert "is not valid JSON" in text_of(trajectory.response_spans[1].token_ids)


@pytest.mark.parametrize(
    ("turns", "limits", "end", "num_spans"),
    [
        ((CALL.format("a"),), {"max_assistant_turns": 1}, EpisodeEnd.TURNS, 1),
        ((CALL.format("a"), CALL.format("b")), {"max_user_turns": 1}, EpisodeEnd.TURNS, 3),
        ((CALL.format("a" * 300),), {"budget": 500}, EpisodeEnd.LENGTH, 1),
        ((CALL.format("a"),), {"budget": 8}, EpisodeEnd.LENGTH, 1),
    ],
)
def test_bounds_end_an_episode_which_is_scored(
    setup: EnvironmentSetup,
    turns: Sequence[str],
    limits: Mapping[str, Any],
    end: EpisodeEnd,
    num_spans: int,
) -> None:
    trajectory, rollout = play(setup, *turns, **limits)
    assert trajectory.episode is not None
    assert (trajectory.episode.end, len(trajectory.response_spans)) == (end, num_spans)
    assert outcome_of_end(trajectory) is None
    assert len(trajectory.response_ids) <= rollout.requests[0].sampling.max_new_tokens


def test_a_result_without_room_ends_the_episode_before_it_is_encoded(
    setup: EnvironmentSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoding it would take a minute, in which no other episode went on."""
    encode = TextCodec.encode
    longest = 0

    def note(codec: TextCodec, texts: Sequence[str]) -> Any:
        nonlocal longest
        longest = max(longest, *map(len, texts))
        return encode(codec, texts)

    monkeypatch.setattr(TextCodec, "encode", note)
    wide = replace(setup, limits=ToolLimits(max_characters=1 << 30))
    trajectory, _ = play(wide, CALL.format("long"), budget=500)
    assert trajectory.episode is not None and trajectory.episode.end is EpisodeEnd.LENGTH
    assert len(trajectory.response_spans) == 1 and outcome_of_end(trajectory) is None
    assert longest < 10_000


def test_m13_a_tool_that_fails_gives_no_reward(setup: EnvironmentSetup) -> None:
    trajectory, rollout = play(setup, CALL.format("fail"))
    outcome = outcome_of_end(trajectory)
    assert outcome is not None
    assert outcome.status is RewardStatus.ERROR
    assert outcome.detail.startswith("the tool look: OSError: no connection")
    assert rollout.forgotten == [56]
    good = Sample(trajectory, "", outcome)
    metrics = episode_metrics([Group(prompt_of(), (good,))])
    assert (metrics["agent/failed"], metrics["agent/end/failed"]) == (1.0, 1.0)


def test_m15_an_episode_that_takes_too_long_gives_no_reward(setup: EnvironmentSetup) -> None:
    trajectory, _ = play(setup, CALL.format("slow"), timeout_s=0.3)
    outcome = outcome_of_end(trajectory)
    assert outcome is not None
    assert outcome.status is RewardStatus.TIMEOUT
    assert outcome.detail == "the episode took longer than 0.3 s"
    assert trajectory.episode is not None and sum(trajectory.episode.waits_s) < 30


class PatientUser:
    """A user in this process who asks for more until the given number of questions is asked."""

    def __init__(self, num_questions: int) -> None:
        self._left = num_questions

    def open(self, task: Task) -> PatientUser:
        return self

    async def step(self, turn: AssistantTurn) -> Observation:
        self._left -= 1
        if self._left < 0:
            return Observation(done=True)
        return Observation(({"role": "user", "content": f"and {self._left}?"},))

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("renders_anew", "num_rows"), [(False, 1), (True, 3)])
def test_m6_a_template_that_drops_thoughts_forks_only_if_it_is_asked_to_render(
    renders_anew: bool, num_rows: int
) -> None:
    codec = codec_for("qwen3")
    messages = [{"role": "user", "content": "q"}]
    text = codec.render([messages])[0]
    ids = tuple(codec.encode([text])[0])
    prompt = Prompt(7, 0, ids, text, "s", "42", messages=messages, agent="tool_agent")
    said = [f"<think>\nhm {i}\n</think>\n\nIt is {i}.<|im_end|>" for i in range(3)]
    rollout: Any = ScriptedRollout(said, codec=codec, must_append=not renders_anew)
    user: Any = PatientUser(2)
    limits = TurnLimits(None, None, 60.0)
    conversing = Conversing(
        codec, user, CALL_FORMATS["hermes"], {}, limits, has_users=True, renders_anew=renders_anew
    )

    async def main() -> Trajectory:
        player = EpisodePlayer(rollout, conversing, trace=TraceRecorder(lambda: 0.0, sink=None))
        request = GenerationRequest((56,), ids, SamplingParams(1.0, 1.0, -1, 400))
        (answers,) = player.start([prompt], [request])
        (trajectory,) = await answers
        return trajectory

    trajectory = asyncio.run(main())
    assert trajectory.episode is not None
    assert trajectory.episode.forks == ("rendered",) * (num_rows - 1)
    drawn = [codec.decode([one.token_ids], skip_special=False)[0] for one in trajectory.completions]
    assert drawn == said
    rows = rows_of(trajectory)
    assert len(rows) == num_rows
    for row, request in zip(rows[::-1], rollout.requests[::-1], strict=False):
        tokens = [*row.prompt_ids, *row.response_ids]
        assert tokens == [*request.prompt_ids, *row.completions[-1].token_ids], "nothing is redrawn"
    starts = [request.first_index for request in rollout.requests]
    ends = [i + len(one.token_ids) for i, one in zip(starts, trajectory.completions, strict=True)]
    assert all(a <= b for a, b in zip(ends, starts[1:], strict=False)), "no number is drawn twice"
    if renders_anew:
        first = codec.decode([rows[1].prompt_ids], skip_special=False)[0]
        assert "It is 0." in first and "hm 0" not in first


def test_m2_no_random_number_is_used_in_two_turns() -> None:
    """A turn that begins after k tokens draws the numbers from position k of its sample on."""
    positions = torch.arange(6)[None]
    whole = uniforms(stream_keys(5, [9]), positions)
    later = uniforms(stream_keys(5, [9], first_indices=[2]), positions[:, :4])
    assert torch.equal(later, whole[:, 2:])
