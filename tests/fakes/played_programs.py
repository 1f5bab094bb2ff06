# SPDX-License-Identifier: Apache-2.0
"""A program that plays an episode in this process, with a policy that draws given texts."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tandem.agents.chat import ChatReply, ChatRequest, RequestRefused, read_chat_request
from tandem.agents.setup import Access, ProgramEnd, ProgramSpec, Task
from tandem.data.call_formats import CALL_FORMATS
from tandem.data.span_tree import rows_of
from tandem.data.tokenizer import TextCodec
from tandem.pipeline.conversing import Conversing, HostedPrograms, TurnLimits
from tandem.pipeline.sessions import Drawing, ProgramSession, play_program
from tandem.types import (
    Completion,
    FinishReason,
    GenerationRequest,
    Prompt,
    SamplingParams,
    Trajectory,
)
from tests.fakes.made_tokenizers import codec_for

QWEN = codec_for("qwen2_5")
SAMPLE = 56
USER = {"role": "user", "content": "q"}


class ScriptedRollout:
    """A policy that draws given texts. Each id of a text is its own random number's index."""

    version = 3

    def __init__(self, turns: Sequence[str], codec: TextCodec) -> None:
        self._turns = iter(turns)
        self._codec = codec
        self.requests: list[GenerationRequest] = []
        self.completions: list[Completion] = []
        self.forgotten: list[int] = []
        self.is_held = asyncio.Event()
        self.is_held.set()

    def submit_apart(self, request: GenerationRequest) -> list[asyncio.Future[Any]]:
        (sample_id,) = request.sample_ids
        self.requests.append(request)
        text = next(self._turns)
        ids = array("i", self._codec.encode([text])[0][: request.sampling.max_new_tokens])
        if text == "NAN":
            reason = FinishReason.FAILED
        else:
            reason = FinishReason.STOP if ids[-1] in self._codec.eos_ids else FinishReason.LENGTH
        log_probs = array("f", [-0.5] * len(ids))
        completion = Completion(sample_id, ids, log_probs, reason, self.version)
        self.completions.append(completion)

        async def deliver() -> tuple[Completion, ...]:
            await self.is_held.wait()
            return (completion,)

        return [asyncio.ensure_future(deliver())]

    async def forget(self, sample_ids: Sequence[int]) -> None:
        self.forgotten += sample_ids


class Agent:
    """A program in this process, with the session that its requests reach."""

    def __init__(self, session: ProgramSession) -> None:
        self.session = session

    def begin(self, messages: Sequence[Any], **fields: Any) -> Drawing:
        retries = fields.pop("num_retries", 0)
        body = json.dumps({"messages": list(messages), **fields}).encode()
        chat: ChatRequest = read_chat_request(body, num_retries=retries)
        try:
            return self.session.request(chat)
        except RequestRefused as error:
            self.session.refuse(error)
            raise

    async def ask(self, messages: Sequence[Any], **fields: Any) -> dict[str, Any]:
        drawing = self.begin(messages, **fields)
        reply: ChatReply = await drawing.reply()
        drawing.confirm()
        return reply.message()


def conversing_of(codec: TextCodec, programs: Any = None, **limits: Any) -> Conversing:
    known: dict[str, Any] = {"max_assistant_turns": None, "max_user_turns": None, "timeout_s": 60.0}
    pool: Any = None
    max_prompt_tokens = limits.pop("max_prompt_tokens", 600)
    return Conversing(
        codec,
        pool,
        CALL_FORMATS["hermes"],
        {},
        TurnLimits(**{**known, **limits}),
        max_prompt_tokens=max_prompt_tokens,
        programs=programs,
    )


Program = Callable[[Agent], Awaitable[Any]]


def play(
    program: Program,
    *turns: str,
    codec: TextCodec = QWEN,
    budget: int = 300,
    gives_reward: bool = False,
    **limits: Any,
) -> tuple[Trajectory, ScriptedRollout]:
    """Play an episode of a program; an exception of it is its failure."""
    made: list[ScriptedRollout] = []

    async def main() -> Trajectory:
        rollout = ScriptedRollout(turns, codec)
        made.append(rollout)
        sessions: list[ProgramSession] = []
        endpoint: Any = SimpleNamespace(
            admit=lambda session: sessions.append(session) or Access("", "", ""),
            close=lambda access: None,
        )

        async def run(name: str, task: Task, *, access: Access) -> ProgramEnd:
            assert (name, task.episode_id, task.seed) == ("mine", (7, SAMPLE), 7)
            try:
                return ProgramEnd(await program(Agent(sessions[0])))
            except (RuntimeError, RequestRefused) as error:
                return ProgramEnd(failure=str(error))

        spec = ProgramSpec("mine", target="x.y", gives_reward=gives_reward)
        programs: Any = SimpleNamespace(
            specs={"mine": spec}, run=run, place=lambda name: asyncio.Semaphore(1)
        )
        conversing = conversing_of(codec, HostedPrograms(programs, endpoint), **limits)
        text = codec.render([[USER]])[0]
        ids = tuple(codec.encode([text])[0])
        prompt = Prompt(7, 0, ids, text, "s", "42", messages=[USER], agent="mine")
        request = GenerationRequest((SAMPLE,), ids, SamplingParams(1.0, 1.0, -1, budget))
        engine: Any = rollout
        return await play_program(prompt, request, conversing=conversing, rollout=engine)

    return asyncio.run(main()), made[0]


def check_tokens(trajectory: Trajectory, rollout: ScriptedRollout) -> None:
    """Each row ends with a request as the engine got it and the tokens as it drew them."""
    rows = rows_of(trajectory)
    asked = {
        tuple([*request.prompt_ids, *drawn.token_ids])
        for request, drawn in zip(rollout.requests, rollout.completions, strict=True)
    }
    for row in rows:
        assert tuple([*row.prompt_ids, *row.response_ids]) in asked
    with_loss = [token for row in rows for one in row.completions for token in one.token_ids]
    drawn = [token for one in trajectory.completions for token in one.token_ids]
    assert sorted(with_loss) == sorted(drawn)
