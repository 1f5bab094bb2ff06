# SPDX-License-Identifier: Apache-2.0
"""Episodes that a program drives: its requests become turns of one sample.

A request that continues a known conversation is appended to the tokens that were drawn. Any other
one is rendered as a whole and forks where its tokens differ; each fork has a reason. What the
program writes is never trained on, and a turn that it never got is left out.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from bisect import bisect_left
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, cast

from tandem.agents.chat import (
    ChatReply,
    ChatRequest,
    RequestRefused,
    drops_thought,
    same_message,
)
from tandem.agents.setup import ProgramEnd, Task
from tandem.data.call_formats import message_of_turn
from tandem.data.dialogue import Dialogue, DialogueRefused
from tandem.data.span_tree import ROOT, SpanTree
from tandem.pipeline.conversing import Conversing
from tandem.pipeline.rollout_loop import RolloutLoop
from tandem.rewards.scoring import judge
from tandem.types import (
    AssistantTurn,
    Completion,
    EpisodeEnd,
    EpisodeRecord,
    FinishReason,
    GenerationRequest,
    Prompt,
    RewardStatus,
    Trajectory,
)

LANE = 1 << 40
"""The distance between the sample ids of requests of one episode that are drawn at the same time,
so that their random numbers differ."""

EDITED, REASONING, COMPACTED = "edited", "reasoning", "compacted"
TOOLS_CHANGED, RESAMPLED, SEPARATE, RENDERED = "tools_changed", "resampled", "separate", "rendered"
"""The reasons of forks: a message differs, a thought is left out, messages are left out, other
tools, a question that was asked before, no message in common, and the template's own."""

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of the policy with the conversation that it ends.

    Attributes:
        messages: the conversation with the turn as its last message, if it is drawn.
        stop: the text that ended the turn; "" for none.
        tip: the index of its span; ``ROOT`` as long as it is being drawn.
    """

    messages: Messages
    tools: str
    stop: str
    tip: int

    def begins(self, messages: Messages) -> int:
        """Return how many messages of this conversation ``messages`` begins with."""
        pairs = enumerate(zip(self.messages, messages, strict=False))
        return sum(1 for _ in takewhile(lambda pair: self._is_same(*pair), pairs))

    def _is_same(self, number: int, pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> bool:
        stop = self.stop if number == len(self.messages) - 1 else ""
        return same_message(*pair, stop=stop)


class Drawing:
    """A turn that is being drawn; implements ``agents.chat.PendingReply``.

    Attributes:
        tools: the tools of the request as text.
        point: the span that the turn follows.
        lane: the number of the stream of random numbers that it is drawn with.
        tip: the span of the turn, once it is drawn.
        num_waiting: the number of requests that wait for the turn.
        num_retries: how often its client had sent the request before, in the last one.
    """

    def __init__(self, chat: ChatRequest, *, tools: str, point: int, lane: int) -> None:
        self.chat, self.tools, self.point, self.lane = chat, tools, point, lane
        self.tip = ROOT
        self.is_delivered = False
        self.num_waiting, self.num_retries = 1, chat.num_retries
        self._task: asyncio.Task[ChatReply] | None = None

    def begin(self, drawing: Coroutine[Any, Any, ChatReply]) -> None:
        """Draw the turn in a task that lasts until ``end``."""
        self._task = asyncio.get_running_loop().create_task(drawing)
        self._task.add_done_callback(_take_error)

    async def reply(self) -> ChatReply:
        """See ``PendingReply``."""
        assert self._task is not None, "the turn is being drawn"
        return await asyncio.shield(self._task)

    def confirm(self) -> None:
        """See ``PendingReply``."""
        self.is_delivered = True
        self.num_waiting -= 1

    def hang_up(self) -> None:
        """See ``PendingReply``."""
        self.num_waiting -= 1

    @property
    def is_lost(self) -> bool:
        """Whether each client that asked for the turn has hung up before it got it."""
        return not self.is_delivered and self.num_waiting == 0

    def repeat(self, chat: ChatRequest) -> None:
        """Let one more request wait for the turn."""
        self.num_waiting += 1
        self.num_retries = chat.num_retries

    @property
    def is_under_way(self) -> bool:
        """Whether the turn is being drawn."""
        return self._task is not None and not self._task.done()

    async def end(self) -> None:
        """Wait no longer for the engine."""
        if self._task is not None and self.is_under_way:
            self._task.cancel()
            await asyncio.wait((self._task,))


class ProgramSession:
    """The episode of one sample of one prompt; implements ``agents.chat.ChatSession``.

    Args:
        request: the request for a single turn: the sample, its sampling and its budget.

    Attributes:
        failure: why the episode is no evidence about the policy; "" if nothing failed.
        deadline: the deadline of the episode, if it has one now. It stands still from the first
            request until the first turn, which may have to wait for rows of the engine.
    """

    def __init__(
        self, request: GenerationRequest, *, conversing: Conversing, rollout: RolloutLoop
    ) -> None:
        (self._sample_id,) = request.sample_ids
        self._request = request
        self._conversing = conversing
        self._rollout = rollout
        self._tree = SpanTree()
        self._turns: list[_Turn] = []
        self._drawings: list[Drawing] = []
        self._lanes: set[int] = set()
        self._forks: list[str] = []
        self._num_calls = self._num_drawn = self._num_reserved = 0
        self._settled = asyncio.Condition()
        self._ended_s = 0.0
        self._waits_s: list[float] = []
        self.failure = ""
        self._limit: tuple[EpisodeEnd | None, int] = None, 0
        self._refusal = "", 0
        self.deadline: asyncio.Timeout | None = None

    @property
    def has_turns(self) -> bool:
        """Whether the program has got a turn."""
        return any(one.is_delivered for one in self._drawings)

    @property
    def limit(self) -> EpisodeEnd | None:
        """The bound that a request was refused for; None if there is none, or a later turn."""
        end, num_before = self._limit
        return None if self._has_turn_since(num_before) else end

    @property
    def refusal(self) -> str:
        """The last refusal of a request; "" if there is none, or a later turn."""
        text, num_before = self._refusal
        return "" if self._has_turn_since(num_before) else text

    def _has_turn_since(self, num_before: int) -> bool:
        """Return whether the program has got a turn that began after this number of others."""
        return any(one.is_delivered for one in self._drawings[num_before:])

    def request(self, chat: ChatRequest) -> Drawing:
        """See ``ChatSession``. A request that is repeated gets the turn that it asked for."""
        known = self._find_repeated(chat)
        if known is not None:
            known.repeat(chat)
            return known
        self._require_turns()
        tools = json.dumps(chat.tools)
        try:
            dialogue = self._conversing.dialogue_with(chat.tools)
            self._require_short(chat, dialogue)
            after, given, reason = self._place(chat, dialogue, tools=tools)
        except DialogueRefused as error:
            self.failure = self.failure or f"the chat template {error}"
            raise RequestRefused(f"the chat template {error}", param="messages") from error
        num_before = len(self._tree.ids_to(after))
        self._require_room(chat, num_before + len(given))
        if reason:
            self._forks.append(reason)
        first_index = self._tree.num_tokens + len(given) if self._drawings else 0
        point = self._tree.give(array("i", given), after=after)
        lane = next(n for n in range(len(self._lanes) + 1) if n not in self._lanes)
        drawing = Drawing(chat, tools=tools, point=point, lane=lane)
        request = replace(
            self._request,
            sample_ids=(self._sample_id + lane * LANE,),
            prompt_ids=tuple(self._tree.ids_to(point)),
            first_index=first_index,
            continues=lane == 0,
            pictures=(),
        )
        self._begin(drawing)
        drawing.begin(self._draw(drawing, request))
        return drawing

    def _find_repeated(self, chat: ChatRequest) -> Drawing | None:
        """Return the turn that a request asks for once more; None if it asks for a new one.

        A turn that was lost goes to the next equal request. That a client is gone may be unknown
        when it sends its request again. Then the turn is the only one that a client may still wait
        for, or else the only one that was sent to a client. If several can be the turn, none is
        taken: all but one belong to other requests.
        """
        equal = [one for one in self._drawings if one.chat.digest == chat.digest]
        lost = next((one for one in equal if one.is_lost), None)
        if lost is not None:
            return lost
        earlier = [one for one in equal if one.num_retries < chat.num_retries]
        likely = [one for one in earlier if not one.is_delivered] or earlier
        return likely[0] if len(likely) == 1 else None

    def _require_turns(self) -> None:
        most = self._conversing.limits.max_assistant_turns
        if most is not None and len(self._drawings) >= most:
            self._limit = EpisodeEnd.TURNS, len(self._drawings)
            rule = f"the episode has had its {most} turns (multi_turn.max_assistant_turns)"
            raise RequestRefused(rule, code="max_turns")

    def _require_short(self, chat: ChatRequest, dialogue: Dialogue) -> None:
        """Refuse a conversation that has no room, whatever its tokens are."""
        most = self._conversing.max_prompt_tokens + self._request.sampling.max_new_tokens
        if dialogue.is_surely_longer(chat.messages, most):
            self._limit = EpisodeEnd.LENGTH, len(self._drawings)
            rule = f"the conversation has more than {most} tokens, and there is no room for a turn"
            raise RequestRefused(rule, code="context_length_exceeded")

    def _begin(self, drawing: Drawing) -> None:
        if self.deadline is not None and not self._drawings:
            self.deadline.reschedule(None)
        if self._drawings and not self._lanes:
            self._waits_s.append(asyncio.get_running_loop().time() - self._ended_s)
        self._lanes.add(drawing.lane)
        self._drawings.append(drawing)

    def _end(self, drawing: Drawing) -> None:
        self._ended_s = now_s = asyncio.get_running_loop().time()
        self._lanes.discard(drawing.lane)
        if self.deadline is not None and self.deadline.when() is None:
            self.deadline.reschedule(now_s + self._conversing.limits.timeout_s)

    def refuse(self, error: RequestRefused) -> None:
        """See ``ChatSession``."""
        self._refusal = str(error), len(self._drawings)

    async def close(self) -> None:
        """Wait for no further turn."""
        for drawing in self._drawings:
            await drawing.end()
        await self._rollout.forget((self._sample_id,))

    def trajectory(self, verdict: EpisodeRecord) -> Trajectory:
        """Return the turns that the program has got, with how the episode ended."""
        got = [one.tip for one in self._drawings if one.is_delivered]
        delivered = [turn.messages for turn in self._turns if turn.tip in got]
        longest = max(delivered, key=len, default=())
        record = replace(
            verdict,
            messages=tuple(longest),
            num_turns=2 * max(len(got), 1),
            waits_s=tuple(self._waits_s),
            forks=tuple(self._forks),
        )
        if not got:
            self._draw_nothing()
            got = [len(self._tree.spans) - 1]
        return self._tree.trajectory(self._sample_id, record, ends=got)

    def _draw_nothing(self) -> None:
        """Add an empty turn to the prompt, for an episode without any."""
        self._tree = SpanTree()
        prompt = self._tree.give(self._request.prompt_ids, after=ROOT)
        self._tree.draw_nothing(self._sample_id, after=prompt, version=self._rollout.version)

    def _budget(self, chat: ChatRequest, num_prompt_tokens: int) -> int:
        """Return the maximum length of the next turn, if no other one is being drawn."""
        most = self._request.sampling.max_new_tokens
        room = self._conversing.max_prompt_tokens + most - num_prompt_tokens
        left = min(room, most - self._num_drawn)
        return left if chat.max_tokens is None else min(left, chat.max_tokens)

    def _require_room(self, chat: ChatRequest, num_prompt_tokens: int) -> None:
        if self._budget(chat, num_prompt_tokens) <= 0:
            self._limit = EpisodeEnd.LENGTH, len(self._drawings)
            raise RequestRefused(
                f"the conversation has {num_prompt_tokens} tokens, {self._num_drawn} of the "
                f"episode were drawn, and there is no room for a turn",
                code="context_length_exceeded",
            )

    @asynccontextmanager
    async def _bounded(
        self, request: GenerationRequest, chat: ChatRequest
    ) -> AsyncGenerator[GenerationRequest]:
        """Yield a request with its budget, which turns that begin meanwhile do not get.

        It waits until the turns that are being drawn can leave it this budget. Raises
        RequestRefused if they left none.
        """
        sampling, num_prompt_tokens = request.sampling, len(request.prompt_ids)

        def is_free() -> bool:
            free = sampling.max_new_tokens - self._num_drawn - self._num_reserved
            return not self._num_reserved or self._budget(chat, num_prompt_tokens) <= free

        async with self._settled:
            await self._settled.wait_for(is_free)
            self._require_room(chat, num_prompt_tokens)
            budget = self._budget(chat, num_prompt_tokens)
            self._num_reserved += budget
        try:
            yield replace(request, sampling=replace(sampling, max_new_tokens=budget))
        finally:
            async with self._settled:
                self._num_reserved -= budget
                self._settled.notify_all()

    def _place(
        self, chat: ChatRequest, dialogue: Dialogue, *, tools: str
    ) -> tuple[int, Sequence[int], str]:
        """Return the span that a request goes on from, the given tokens, and why it forks."""
        messages = chat.messages
        known = [
            turn
            for turn in self._turns
            if turn.tools == tools and turn.begins(messages) == len(turn.messages) < len(messages)
        ]
        last = max(known, key=lambda turn: (len(turn.messages), turn.tip), default=None)
        new = messages[len(last.messages) :] if last else messages
        renders = self._conversing.renders_anew and new[0]["role"] != "tool"
        if last and not renders and all(one["role"] != "assistant" for one in new):
            last_id = self._tree.spans[last.tip].token_ids[-1]
            given = dialogue.between(new, last_id=last_id)
            return last.tip, given, RESAMPLED if last.tip in self._tree.parents else ""
        ids = dialogue.encode_whole(messages)
        after, num_shared = self._tree.find(ids)
        goes_on = any(turn.tip == after for turn in self._turns)
        if goes_on and after not in self._tree.parents:
            return after, ids[num_shared:], ""
        reason = (RENDERED if renders else EDITED) if last else self._reason(messages, tools)
        return after, ids[num_shared:], reason

    def _reason(self, messages: Messages, tools: str) -> str:
        """Return why a request continues no conversation that is known; "" for the first one."""
        begun = [one for one in self._drawings if one.is_under_way]
        asked = [_Turn(one.chat.messages, one.tools, stop="", tip=ROOT) for one in begun]
        known = [*self._turns, *asked]
        nearest = max(known, key=lambda turn: turn.begins(messages), default=None)
        if nearest is None:
            return ""
        num_equal = nearest.begins(messages)
        if num_equal == 0:
            return SEPARATE
        if nearest.tools != tools:
            return TOOLS_CHANGED
        if num_equal == len(messages):
            return RESAMPLED
        if nearest.tip == ROOT and num_equal == len(nearest.messages):
            return COMPACTED  # it leaves out the turn that is being drawn
        if num_equal < len(nearest.messages):
            ours, theirs = nearest.messages[num_equal], messages[num_equal]
            if drops_thought(ours, theirs):
                return REASONING
            if ours["role"] != theirs["role"]:
                return COMPACTED
        return EDITED

    async def _draw(self, drawing: Drawing, request: GenerationRequest) -> ChatReply:
        """Wait for a turn, keep its tokens, and return it as the program sees it."""
        chat = drawing.chat
        try:
            async with self._bounded(request, chat) as bounded:
                (future,) = self._rollout.submit_apart(bounded)
                (completion,) = await future
                completion, stop = self._keep(completion, drawing)
        finally:
            self._end(drawing)
        said = self._parse(completion, drawing, stop=stop)
        self._num_calls += len(said.calls)
        messages = (*chat.messages, message_of_turn(said))
        self._turns.append(_Turn(messages, drawing.tools, stop, drawing.tip))
        return ChatReply(
            text=said.text,
            calls=said.calls,
            finish_reason=completion.finish_reason,
            num_prompt_tokens=len(request.prompt_ids),
            num_drawn_tokens=len(completion.token_ids),
            tokens=self._token_log_probs(completion) if chat.has_log_probs else (),
        )

    def _keep(self, completion: Completion, drawing: Drawing) -> tuple[Completion, str]:
        """Keep the tokens of a turn; return it up to its stop text, and that text."""
        if completion.finish_reason is FinishReason.FAILED:
            self.failure = "the generation failed: its logits are not finite"
            raise RequestRefused(self.failure, status=500)
        completion = replace(completion, sample_id=self._sample_id)
        completion, stop = _cut_at_stop(completion, drawing.chat.stops, decode=self._decode)
        drawing.tip = self._tree.draw(completion, after=drawing.point)
        self._num_drawn += len(completion.token_ids)
        return completion, stop

    def _token_log_probs(self, completion: Completion) -> tuple[tuple[str, float], ...]:
        ids = [[token] for token in completion.token_ids]
        texts = self._conversing.codec.decode(ids, skip_special=False)
        return tuple(zip(texts, completion.log_probs, strict=True))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._conversing.codec.decode([ids], skip_special=False)[0]

    def _parse(self, completion: Completion, drawing: Drawing, *, stop: str) -> AssistantTurn:
        """Parse a turn; one with malformed calls is text as a whole, as other servers show it."""
        ids = completion.token_ids
        text, end = self._conversing.decode_turn(ids)
        plain = AssistantTurn(text[: text.index(stop)] if stop else text.removesuffix(end))
        if not drawing.chat.tools:
            return plain
        said = self._conversing.parse(
            ids,
            after=self._tree.spans[drawing.point].token_ids,
            tools=drawing.chat.tools,
            first_call=self._num_calls,
            stop=stop,
        )
        return plain if said.malformed else said


def _cut_at_stop(
    completion: Completion, stops: Sequence[str], *, decode: Callable[[Sequence[int]], str]
) -> tuple[Completion, str]:
    """Return a turn up to the token that completes the first stop text, and that text.

    The tokens behind it are dropped. When a turn ends depends only on tokens before, so that what
    is left is still drawn from the policy.
    """
    ids = completion.token_ids
    text = decode(ids)
    found = min((stop for stop in stops if stop in text), key=text.index, default="")
    if not found:
        return completion, ""
    length = bisect_left(range(len(ids)), True, key=lambda n: found in decode(ids[: n + 1])) + 1
    switches = tuple(switch for switch in completion.switches if switch[0] < length)
    routes = completion.routes
    num_cut = len(ids) - length
    cut = replace(
        completion,
        token_ids=ids[:length],
        log_probs=completion.log_probs[:length],
        finish_reason=FinishReason.STOP,
        switches=switches,
        routes=None if routes is None else routes[: len(routes) - num_cut],
    )
    return cut, found


def _take_error(task: asyncio.Task[ChatReply]) -> None:
    """Take the error of a turn that nobody waits for any more."""
    if not task.cancelled():
        task.exception()


async def play_program(
    prompt: Prompt, request: GenerationRequest, *, conversing: Conversing, rollout: RolloutLoop
) -> Trajectory:
    """Let the agent of a prompt play one sample, within its deadline."""
    hosted = conversing.programs
    assert hosted is not None, "the agent is one of these"
    (sample_id,) = request.sample_ids
    task = Task(
        messages=() if isinstance(prompt.messages, str) else tuple(prompt.messages),
        data_source=prompt.data_source,
        extra_info=prompt.extra_info,
        seed=prompt.uid,
        episode_id=(prompt.uid, sample_id),
        tools=(),
    )
    timeout_s = conversing.limits.timeout_s
    session = ProgramSession(request, conversing=conversing, rollout=rollout)
    async with hosted.programs.place(prompt.agent):
        access = hosted.endpoint.admit(session)
        ended = None
        try:
            async with asyncio.timeout(timeout_s) as session.deadline:
                ended = await hosted.programs.run(prompt.agent, task, access=access)
        except TimeoutError:
            pass
        finally:
            session.deadline = None
            hosted.endpoint.close(access)
            await session.close()
    gives_reward = hosted.programs.specs[prompt.agent].gives_reward
    verdict = _judge(session, ended, timeout_s=timeout_s, gives_reward=gives_reward)
    return session.trajectory(verdict)


def _judge(
    session: ProgramSession, ended: ProgramEnd | None, *, timeout_s: float, gives_reward: bool
) -> EpisodeRecord:
    """Return how an episode ended.

    Args:
        ended: the end of the agent; None if it was stopped at its deadline.
    """
    if ended is None:
        detail = f"the episode took longer than {timeout_s:g} s"
        return EpisodeRecord(EpisodeEnd.DEADLINE, detail)
    failure = session.failure
    if not failure and ended.failure and session.limit is None:
        refused = f"; the endpoint refused: {session.refusal}" if session.refusal else ""
        failure = f"the agent: {ended.failure}{refused}"
    if not failure and not session.has_turns:
        refused = f" ({session.refusal})" if session.refusal else ""
        failure = f"the agent ended without a turn of the policy{refused}"
    given = judge(_with_score(ended.returned))
    has_value = given.status is RewardStatus.VALUE
    if not failure and gives_reward and not has_value:
        failure = f"the agent gave no reward: {ended.failure or given.detail}"
    if failure:
        return EpisodeRecord(EpisodeEnd.FAILED, failure)
    return EpisodeRecord(
        session.limit or EpisodeEnd.DONE,
        rewards=(given.score,) if has_value else (),
        outcome=given if gives_reward else None,
    )


def _with_score(returned: Any) -> Any:
    """Return what an agent gave in the form of a reward function: ``reward`` is the score."""
    if not isinstance(returned, Mapping) or "reward" not in returned:
        return cast(object, returned)
    fields = dict(cast(Mapping[str, Any], returned))
    return {"score": fields.pop("reward"), **fields}
