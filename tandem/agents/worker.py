# SPDX-License-Identifier: Apache-2.0
"""The program of an environment process: turns come in, observations go out.

Input is an ``EnvironmentSetup``, then steps and ends of episodes, each after a secret number.
Output is JSON lines: a greeting with the schemas of the tools, then an answer for each message.
Steps of several episodes run at the same time; an episode is made at its first step, and kept from
then on only if it has state. The program imports neither torch nor transformers.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.agents.environment import ToolEnvironment, interaction_of, load_interactions
from tandem.agents.hosting import HostedAgents, Play
from tandem.agents.mcp import connect_tools
from tandem.agents.openenv import OpenEnvEpisode, read_action_schemas
from tandem.agents.setup import EnvironmentSetup, ServerFull, Task
from tandem.agents.tools import LoadedTool, ToolFailed, load_tools, name_tools
from tandem.children.child import (
    encode_line,
    open_channel,
    receive_concurrently,
    receive_first,
    set_limits,
    write_prints_to,
)
from tandem.config.schema.imports import describe
from tandem.errors import NO_VALUE, UserError
from tandem.types import AssistantTurn, Observation, ToolStatus

NUMBER_BYTES = 16
_EXIT_INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Step:
    """A turn of an episode to answer; None for its beginning.

    Attributes:
        before: the messages between the prompt and the turn, for a process that does not hold the
            episode.
    """

    task: Task
    turn: AssistantTurn | None
    before: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The end of an episode, or of the agent that plays it."""

    episode_id: tuple[int, int]


class EpisodeEnvironment(Protocol):
    """The environment of one episode.

    Attributes:
        num_hung: the number of its calls that still run although their time is over.
        is_stateful: whether a new process could not go on with the episode.
    """

    @property
    def num_hung(self) -> int: ...

    @property
    def is_stateful(self) -> bool: ...

    async def reset(self) -> Observation: ...

    async def step(self, turn: AssistantTurn) -> Observation: ...

    async def close(self) -> str: ...


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Serve steps until the other end of the channel closes."""
    try:
        _work(open_channel(channel_fd, lifeline_fd))
    except ConnectionError:
        return  # the parent is gone
    except KeyboardInterrupt:
        # Raised by code of the user: this process is in a session of its own. The parent says so.
        os._exit(_EXIT_INTERRUPTED)


def _work(channel: socket.socket) -> None:
    setup: EnvironmentSetup = pickle.loads(receive_first(channel))
    set_limits(memory_limit_bytes=None)
    if setup.log is not None:
        write_prints_to(setup.log)
    with asyncio.Runner() as runner:
        try:
            # Classes and functions are loaded outside the loop: some run a loop of their own.
            loaded = load_tools(setup)
            tools = name_tools([*loaded, *runner.run(connect_tools(setup.served))])
            interactions = load_interactions(setup.interactions)
            hosted = HostedAgents(setup.programs)
            actions = read_action_schemas(setup.openenvs)
        except UserError as error:
            value = None if error.value is NO_VALUE else [error.value]
            channel.sendall(encode_line({"error": [error.key, value, error.rule, error.remedy]}))
            return
        schemas = [tool.schema for tool in tools.values()]
        channel.sendall(encode_line({"schemas": schemas, "actions": actions}))
        server = _Server(setup, tools=tools, interactions=interactions, hosted=hosted)
        _run_through_exits(runner.get_loop(), server.serve(channel))


def _run_through_exits(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, None]) -> None:
    """Run to the end of ``work``, also if a task that code of the user has started exits.

    asyncio stops the loop then. The code that awaits the task gets the exit, and fails by it.
    """
    task = loop.create_task(work)
    while not task.done():
        try:
            loop.run_until_complete(task)
        except SystemExit:
            if task.done():
                raise


class _Server:
    """The episodes of this process."""

    def __init__(
        self,
        setup: EnvironmentSetup,
        *,
        tools: dict[str, LoadedTool],
        interactions: dict[str, Any],
        hosted: HostedAgents,
    ) -> None:
        self._setup = setup
        self._hosted = hosted
        self._tools = tools
        self._interactions = interactions
        self._openenvs = {spec.name: spec for spec in setup.openenvs}
        self._episodes: dict[tuple[int, int], EpisodeEnvironment] = {}
        self._has_logged = setup.log is None

    async def serve(self, channel: socket.socket) -> None:
        """Answer messages as they come, each in a task of its own."""
        reader, writer = await asyncio.open_connection(sock=channel)

        async def answer(message: bytes) -> None:
            request: Step | End | Play = pickle.loads(message[NUMBER_BYTES:])
            if isinstance(request, Step):
                content = await self._step(request)
            elif isinstance(request, Play):
                content = await self._play(request)
            else:
                content = await self._end(request.episode_id)
            writer.write(encode_line([message[:NUMBER_BYTES].hex(), content]))

        async with asyncio.TaskGroup() as tasks:
            async for message in receive_concurrently(reader):
                tasks.create_task(answer(message))

    async def _step(self, request: Step) -> dict[str, Any]:
        identity, turn = request.task.episode_id, request.turn
        try:
            with _failures_as_ones_of_tools():
                episode = self._episodes.get(identity) or self._make(request)
                self._episodes[identity] = episode
                observation = await (episode.reset() if turn is None else episode.step(turn))
        except ToolFailed as error:
            self._log(str(error))
            return _fields(_failed(error), is_stateful=False, num_hung=0)
        except ServerFull as error:
            self._episodes.pop(identity, None)
            answer = _fields(Observation(), is_stateful=False, num_hung=0)
            return {**answer, "full": str(error), "num_places": error.num_places}
        if observation.detail:
            self._log(observation.detail)
        if self._episodes.get(identity) is not episode:  # it was ended meanwhile
            await self._close(episode)
        elif not episode.is_stateful:
            del self._episodes[identity]
        return _fields(observation, is_stateful=episode.is_stateful, num_hung=episode.num_hung)

    def _make(self, request: Step) -> EpisodeEnvironment:
        task, limits = request.task, self._setup.limits
        if task.agent:
            spec = self._openenvs[task.agent]
            return OpenEnvEpisode(task, spec, limits=limits)
        return ToolEnvironment(
            task,
            before=request.before,
            tools=self._tools,
            interaction=interaction_of(task, self._interactions),
            limits=limits,
        )

    async def _play(self, request: Play) -> dict[str, Any]:
        fields = await self._hosted.play(request)
        if "traceback" in fields:
            self._log(fields.pop("traceback"))
        return fields

    async def _end(self, episode_id: tuple[int, int]) -> dict[str, Any]:
        num_hung = await self._hosted.stop(episode_id)
        episode = self._episodes.pop(episode_id, None)
        if episode is not None:
            await self._close(episode)
        return {"num_hung": num_hung}

    async def _close(self, episode: EpisodeEnvironment) -> None:
        try:
            with _failures_as_ones_of_tools():
                failure = await episode.close()
        except ToolFailed as error:
            failure = str(error)
        if failure:
            self._log(failure)

    def _log(self, text: str) -> None:
        """Write the first failure of this process to its log."""
        if not self._has_logged:
            self._has_logged = True
            text = f"The first error of environment process {os.getpid()}:\n{text}\n"
            os.write(2, text.encode(errors="backslashreplace"))


@contextmanager
def _failures_as_ones_of_tools() -> Iterator[None]:
    """Let an error that nobody expected fail its episode, and not the process."""
    try:
        yield
    except (ToolFailed, ServerFull):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ToolFailed(describe(error)) from error
    except Exception as error:
        raise ToolFailed(describe(error)) from error


def _failed(error: ToolFailed) -> Observation:
    return Observation(done=True, statuses=(ToolStatus.FAILED,), detail=str(error))


def _fields(observation: Observation, *, is_stateful: bool, num_hung: int) -> dict[str, Any]:
    return {
        "messages": [dict(message) for message in observation.messages],
        "done": observation.done,
        "rewards": list(observation.rewards),
        "statuses": [status.value for status in observation.statuses],
        "detail": observation.detail,
        "is_stateful": is_stateful,
        "num_hung": num_hung,
    }
