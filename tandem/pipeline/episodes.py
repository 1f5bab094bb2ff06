# SPDX-License-Identifier: Apache-2.0
"""Episodes: the turns of the policy and of its environment, up to a trajectory.

An episode asks the engine for a turn, parses it, lets the environment answer, and appends the
tokens of the answer. It waits for the engine, or for its environment; both waits end, because the
environment has a deadline for each step and the episode has one for all of them. The prompts that
a deadline or a failed tool ends have no reward and are out of the baseline of their group.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.agents.pool import EnvironmentSession
from tandem.agents.setup import Task
from tandem.data.call_formats import message_of_turn
from tandem.data.dialogue import DialogueRefused
from tandem.data.span_tree import ROOT, SpanTree
from tandem.metrics.trace import TraceRecorder
from tandem.pipeline.conversing import Conversing
from tandem.pipeline.first_attempts import FirstAttempts
from tandem.pipeline.rollout_loop import RolloutLoop
from tandem.pipeline.sessions import RENDERED, play_program
from tandem.rewards.scoring import judge
from tandem.types import (
    AssistantTurn,
    Completion,
    EpisodeEnd,
    EpisodeRecord,
    FinishReason,
    GenerationRequest,
    Observation,
    Prompt,
    RewardOutcome,
    RewardStatus,
    ToolStatus,
    Trajectory,
)

Answers = asyncio.Future[Any]
"""The answers to a request, a tuple: completions of single turns, or trajectories of episodes."""

Turn = asyncio.Future[tuple[Completion, ...]]
"""A turn of one sample that is being drawn."""


class EpisodePlayer:
    """The player of all requests of a run: single turns, and episodes of several turns.

    Args:
        conversing: what agents need; None if every row is a single turn.
    """

    def __init__(
        self, rollout: RolloutLoop, conversing: Conversing | None, *, trace: TraceRecorder
    ) -> None:
        self._rollout = rollout
        self._conversing = conversing
        self._trace = trace
        self._attempts = FirstAttempts()

    def start(
        self, prompts: Sequence[Prompt], requests: Sequence[GenerationRequest]
    ) -> Sequence[Answers]:
        """Queue the first turns together; return the answers to each request.

        They are completions of a single turn, or trajectories of episodes.
        """
        if self._conversing is None:
            return self._rollout.submit(requests)
        return [
            self._start_one(prompt, request)
            for prompt, request in zip(prompts, requests, strict=True)
        ]

    def _start_one(self, prompt: Prompt, request: GenerationRequest) -> Answers:
        if not prompt.agent:
            (future,) = self._rollout.submit([request])
            return future
        assert self._conversing is not None, "only a run with conversations starts one"
        if self._conversing.plays_program(prompt.agent):
            playing = self._play_programs(prompt, request)
            return asyncio.get_running_loop().create_task(playing)
        request = replace(request, continues=True)
        # A server's environment says something before the first turn.
        is_hosted = prompt.agent in self._conversing.hosted
        turns = None if is_hosted else self._rollout.submit_apart(request)
        playing = self._play_all(prompt, request, turns=turns)
        return asyncio.get_running_loop().create_task(playing)

    async def _play_all(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        *,
        turns: Sequence[Turn] | None,
    ) -> tuple[Trajectory, ...]:
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._play(prompt, replace(request, sample_ids=(sample_id,)), turn=turn)
                )
                for sample_id, turn in zip(
                    request.sample_ids, turns or [None] * len(request.sample_ids), strict=True
                )
            ]
        return tuple(task.result() for task in tasks)

    async def _play_programs(
        self, prompt: Prompt, request: GenerationRequest
    ) -> tuple[Trajectory, ...]:
        """Let an agent of the user play each sample; the engine hears of none before it calls."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(
                    self._play_program(prompt, replace(request, sample_ids=(sample_id,)))
                )
                for sample_id in request.sample_ids
            ]
        return tuple(task.result() for task in tasks)

    async def _play_program(self, prompt: Prompt, request: GenerationRequest) -> Trajectory:
        assert self._conversing is not None, "an agent plays only with what it needs"
        programs = self._conversing.programs
        assert programs is not None, "the agent is one of these"
        most = programs.programs.specs[prompt.agent].max_running
        with self._attempts.begin(prompt.agent, num_places=most) as conclude:
            trajectory = await play_program(
                prompt, request, conversing=self._conversing, rollout=self._rollout
            )
            record = trajectory.episode
            assert record is not None, "an agent plays an episode"
            conclude(record.detail if record.end is EpisodeEnd.FAILED else "")
        return trajectory

    async def _play(
        self,
        prompt: Prompt,
        request: GenerationRequest,
        *,
        turn: Turn | None,
    ) -> Trajectory:
        """Play one sample; its environment is reset first if there is no first turn yet."""
        assert self._conversing is not None, "an agent plays only with what it needs"
        (sample_id,) = request.sample_ids
        episode = _Episode(prompt, request, conversing=self._conversing)
        session = self._conversing.environments.open(episode.task)
        try:
            turn = turn or await self._reset(episode, session)
            while turn is not None:
                (completion,) = await turn
                said = episode.take(completion)
                if episode.end is None:
                    await self._answer(episode, session, said=said)
                turn = self._next_turn(episode)
            return episode.trajectory(version=self._rollout.version)
        finally:
            await self._rollout.forget((sample_id,))
            await session.close()

    async def _reset(self, episode: _Episode, session: EnvironmentSession) -> Turn | None:
        """Let the environment begin an episode; return the first turn, None if it has failed."""
        assert episode.hosted is not None, "only an environment of a server is reset"
        most = episode.hosted.max_running
        with self._attempts.begin(episode.task.agent, num_places=most) as conclude:
            with self._trace.span("environment", "reset"):
                observation = await session.reset(timeout_s=episode.conversing.limits.timeout_s)
            episode.begin(observation)
            conclude(episode.detail)
        return self._next_turn(episode)

    def _next_turn(self, episode: _Episode) -> Turn | None:
        if episode.end is not None:
            return None
        (turn,) = self._rollout.submit_apart(episode.next_request())
        return turn

    async def _answer(
        self, episode: _Episode, session: EnvironmentSession, *, said: AssistantTurn
    ) -> None:
        """Let the environment answer a turn, within the deadline of the episode."""
        with self._attempts.begin() as conclude:
            observation = await self._ask(episode, session, said=said)
            if observation is None:
                limit_s = episode.conversing.limits.timeout_s
                detail = f"the episode took longer than {limit_s:g} s"
                episode.finish(EpisodeEnd.DEADLINE, detail)
                return
            has_failed = ToolStatus.FAILED in observation.statuses
            conclude((observation.detail or "a tool failed") if has_failed else "")
        episode.observe(observation)

    async def _ask(
        self, episode: _Episode, session: EnvironmentSession, *, said: AssistantTurn
    ) -> Observation | None:
        """Return what the environment answers to a turn; None at the deadline of the episode."""
        loop = asyncio.get_running_loop()
        begin_s = loop.time()
        try:
            with self._trace.span("environment", "step"):
                async with asyncio.timeout_at(episode.ends_s):
                    return await session.step(said)
        except TimeoutError:
            return None
        finally:
            episode.waits_s.append(loop.time() - begin_s)


def trajectories_of(prompt: Prompt, answers: Sequence[Completion | Trajectory]) -> list[Trajectory]:
    """Return the trajectories of the answers to one prompt."""
    return [
        Trajectory.of_single_turn(prompt.token_ids, one) if isinstance(one, Completion) else one
        for one in answers
    ]


class _Episode:
    """The state of one episode: its spans, messages and counts."""

    def __init__(
        self, prompt: Prompt, request: GenerationRequest, *, conversing: Conversing
    ) -> None:
        (sample_id,) = request.sample_ids
        schemas = conversing.schemas_of(prompt.agent, prompt.extra_info)
        tools = tuple(schema["function"]["name"] for schema in schemas)
        self.hosted = conversing.hosted.get(prompt.agent)
        self.conversing = conversing
        self.task = Task(
            messages=() if isinstance(prompt.messages, str) else tuple(prompt.messages),
            data_source=prompt.data_source,
            extra_info=prompt.extra_info,
            seed=prompt.uid,
            episode_id=(prompt.uid, sample_id),
            tools=tools,
            agent=prompt.agent if self.hosted is not None else "",
        )
        self.end: EpisodeEnd | None = None
        self.ends_s = math.inf
        self.waits_s: list[float] = []
        self._request = request
        self._dialogue = conversing.dialogue_of(schemas)
        self._schemas = schemas
        self._answers_text = conversing.answers_text(prompt.agent)
        self._tree = SpanTree()
        self._tip = self._tree.give(request.prompt_ids, after=ROOT)
        self._forks: list[str] = []
        self._messages: list[Mapping[str, Any]] = []
        self._rewards: list[float] = []
        self._statuses: list[ToolStatus] = []
        self._num_calls = self._num_user_turns = self._num_assistant_turns = 0
        self.detail = ""

    @property
    def _num_response_tokens(self) -> int:
        """The number of tokens behind the prompt; after a fork, those of all branches."""
        return self._tree.num_tokens - len(self._request.prompt_ids)

    def begin(self, observation: Observation) -> None:
        """Take what the environment says first: it follows the messages of the row."""
        if ToolStatus.FAILED in observation.statuses:
            self.finish(EpisodeEnd.FAILED, observation.detail)
            return
        most = self.conversing.max_prompt_tokens
        key = "data.max_prompt_length"
        if self._dialogue.is_surely_longer(observation.messages, most):
            detail = f"the first observation has more than {most} tokens ({key})"
            self.finish(EpisodeEnd.FAILED, detail)
            return
        try:
            chat = [*self.task.messages, *observation.messages]
            ids = self._dialogue.encode_whole(chat)
        except DialogueRefused as error:
            self.finish(EpisodeEnd.FAILED, f"the chat template {error}")
            return
        if len(ids) > most:
            detail = f"the first observation makes a prompt of {len(ids)} tokens, more than {most}"
            self.finish(EpisodeEnd.FAILED, f"{detail} ({key})")
            return
        self._request = replace(self._request, prompt_ids=tuple(ids))
        self._tree = SpanTree()
        self._tip = self._tree.give(ids, after=ROOT)
        self._messages += observation.messages
        self._rewards += observation.rewards

    def take(self, completion: Completion) -> AssistantTurn:
        """Append a drawn turn, and end the episode if it may not go on after it."""
        if self.ends_s == math.inf:
            now_s = asyncio.get_running_loop().time()
            self.ends_s = now_s + self.conversing.limits.timeout_s
        self._tip = self._tree.draw(completion, after=self._tip)
        self._num_assistant_turns += 1
        said = self._parse(completion)
        self._num_calls += len(said.calls)
        self._messages.append(message_of_turn(said))
        limits = self.conversing.limits
        calls = bool(said.calls or said.malformed)
        if completion.finish_reason is FinishReason.FAILED:
            self.finish(EpisodeEnd.FAILED, "the generation failed: its logits are not finite")
        elif self._num_response_tokens >= self._request.sampling.max_new_tokens:
            self.finish(EpisodeEnd.LENGTH)
        elif not calls and not self._answers_text:
            self.finish(EpisodeEnd.ANSWER)
        elif limits.are_reached(self._num_assistant_turns, self._num_user_turns):
            self.finish(EpisodeEnd.TURNS)
        return said

    def observe(self, observation: Observation) -> None:
        """Append the answer of the environment, unless it ends the episode or does not fit."""
        self._rewards += observation.rewards
        self._statuses += observation.statuses
        if ToolStatus.FAILED in observation.statuses:
            self.finish(EpisodeEnd.FAILED, observation.detail)
            return
        if observation.done or not observation.messages:
            self.finish(EpisodeEnd.DONE)
            return
        left = self._request.sampling.max_new_tokens - self._num_response_tokens
        if self._dialogue.is_surely_longer(observation.messages, left):
            self.finish(EpisodeEnd.LENGTH)
            return
        try:
            after, given = self._place(observation.messages)
        except DialogueRefused as error:
            self.finish(EpisodeEnd.FAILED, f"the chat template {error}")
            return
        if len(given) >= left:
            self.finish(EpisodeEnd.LENGTH)
            return
        if after != self._tip:
            self._forks.append(RENDERED)
        self._num_user_turns += 1
        self._messages += observation.messages
        self._tip = self._tree.give(array("i", given), after=after)

    def _place(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, list[int]]:
        """Return the span that the messages follow, and their tokens."""
        if not self.conversing.renders_anew or messages[0]["role"] == "tool":
            last_id = self._tree.spans[self._tip].token_ids[-1]
            return self._tip, self._dialogue.between(messages, last_id=last_id)
        chat = [*self.task.messages, *self._messages, *messages]
        ids = self._dialogue.encode_whole(chat)
        after, num_shared = self._tree.find(ids)
        return after, ids[num_shared:]

    def finish(self, end: EpisodeEnd, detail: str = "") -> None:
        """End the episode."""
        self.end, self.detail = end, detail

    def next_request(self) -> GenerationRequest:
        """Return the request for the next turn: all tokens so far, id for id."""
        drawn = self._num_response_tokens
        sampling = self._request.sampling
        left = sampling.max_new_tokens - drawn
        return replace(
            self._request,
            prompt_ids=tuple(self._tree.ids_to(self._tip)),
            sampling=replace(sampling, max_new_tokens=left),
            first_index=drawn,
        )

    def trajectory(self, *, version: int) -> Trajectory:
        """Return the spans and the record of the ended episode.

        Args:
            version: the version of the weights, for an episode without a turn.
        """
        assert self.end is not None, "the episode has ended"
        sample_id = self.task.episode_id[1]
        if not self._num_assistant_turns:
            self._tree.draw_nothing(sample_id, after=self._tip, version=version)
        outcome = self._outcome()
        record = EpisodeRecord(
            end=self.end,
            detail=self.detail,
            messages=tuple(self._messages),
            rewards=tuple(self._rewards),
            statuses=tuple(self._statuses),
            num_turns=self._num_assistant_turns + self._num_user_turns + 1,
            waits_s=tuple(self.waits_s),
            forks=tuple(self._forks),
            outcome=outcome,
        )
        return self._tree.trajectory(sample_id, record)

    def _outcome(self) -> RewardOutcome | None:
        """Return the reward if the environment gives it: the sum; else None.

        The sum is 0 if the environment has refused all actions, as they are the policy's mistakes.
        """
        if self.hosted is None or not self.hosted.gives_reward or self.end is None:
            return None
        if self.end.is_fault:
            return None
        if ToolStatus.OK in self._statuses and not self._rewards:
            self.finish(EpisodeEnd.FAILED, "the environment gave no reward; set reward: function")
            return None
        return judge(sum(self._rewards))

    def _parse(self, completion: Completion) -> AssistantTurn:
        return self.conversing.parse(
            completion.token_ids,
            after=self._tree.spans[self._tree.parents[self._tip]].token_ids,
            tools=self._schemas,
            first_call=self._num_calls,
        )


def outcome_of_end(trajectory: Trajectory) -> RewardOutcome | None:
    """Return the reward of an episode that no function scores; else None.

    It is no evidence about the policy, or its agent has given the reward.
    """
    record = trajectory.episode
    if record is None or not record.end.is_fault:
        return None if record is None else record.outcome
    is_late = record.end is EpisodeEnd.DEADLINE
    status = RewardStatus.TIMEOUT if is_late else RewardStatus.ERROR
    return RewardOutcome(status, math.nan, detail=record.detail)


def reward_context(prompt: Prompt, trajectory: Trajectory) -> Mapping[str, Any]:
    """Return ``extra_info`` for the reward: the row's, and the course of the episode."""
    if trajectory.episode is None:
        return prompt.extra_info
    return episode_context(prompt.extra_info, trajectory.episode)


def episode_context(extra_info: Mapping[str, Any], record: EpisodeRecord) -> Mapping[str, Any]:
    """Return ``extra_info`` with the course of an episode."""
    return {
        **extra_info,
        "num_turns": record.num_turns,
        "messages": [dict(message) for message in record.messages],
        "tool_rewards": list(record.rewards),
        "turn_scores": list(record.rewards),
    }
