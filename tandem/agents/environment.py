# SPDX-License-Identifier: Apache-2.0
"""The built-in environment of an episode: tools that answer calls, and a simulated user.

It lives in a child process and never sees tokens. Calls of a turn run together; their results stand
in the order of the calls. Every call gets an answer, also a malformed one and one too many. A turn
without calls goes to the simulated user, if the row has one, and else ends the episode.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from tandem.agents.setup import INTERACTION_KEY, InteractionSpec, Task, ToolLimits
from tandem.agents.tools import (
    LoadedTool,
    ToolEpisode,
    ToolFailed,
    ToolResult,
    answer_call,
    call_method,
    import_class,
    read_return,
)
from tandem.config.schema.imports import describe
from tandem.data.call_formats import call_id, message_of_turn, result_message
from tandem.errors import UserError
from tandem.types import AssistantTurn, Observation, ToolStatus

_NO_TOOL = "none"
_MAX_CHARACTERS = 4_000_000
"""The most characters of a message of a simulated user. Results of tools have a key for this."""


class ToolEnvironment:
    """The environment of one episode.

    Args:
        before: the messages between the prompt and the first turn.
        tools: all tools of the process.
        interaction: the simulated user of the row; None without one.
    """

    def __init__(
        self,
        task: Task,
        *,
        before: Sequence[Mapping[str, Any]] = (),
        tools: Mapping[str, LoadedTool],
        interaction: Any,
        limits: ToolLimits,
    ) -> None:
        self._tools = tools
        self._interaction = interaction
        self._limits = limits
        self._episode = ToolEpisode(task, [dict(message) for message in (*task.messages, *before)])
        self._user: str | None = None

    @property
    def num_hung(self) -> int:
        """The number of its calls that still run although their time is over."""
        return self._episode.num_hung

    @property
    def is_stateful(self) -> bool:
        """Whether a new process could not go on with the episode."""
        return bool(self._episode.instances) or self._user is not None

    async def reset(self) -> Observation:
        """Begin the episode, about which tools have nothing to say."""
        return Observation()

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer a turn of the policy."""
        self._episode.messages.append(message_of_turn(turn))
        try:
            if turn.calls or turn.malformed:
                observation = await self._answer_calls(turn)
            elif self._interaction is not None:
                observation = await self._ask_user()
            else:
                observation = Observation(done=True)
        except ToolFailed as error:
            return Observation(done=True, statuses=(ToolStatus.FAILED,), detail=str(error))
        self._episode.messages.extend(dict(message) for message in observation.messages)
        return observation

    async def close(self) -> str:
        """Release all instances and end the interaction; return the first failure, or ""."""
        releases = [tool.release(self._episode) for tool in self._tools.values()]
        user, self._user = self._user, None
        if user is not None:
            ending = self._interaction.finalize_interaction
            releases.append(call_method(ending, (), known={"instance_id": user}))
        results = await asyncio.gather(*releases, return_exceptions=True)
        failures = [one for one in results if isinstance(one, BaseException)]
        return "".join(traceback.format_exception(failures[0])) if failures else ""

    async def _answer_calls(self, turn: AssistantTurn) -> Observation:
        most = self._limits.max_parallel_calls
        running = [
            answer_call(call, self._tools, episode=self._episode, limits=self._limits)
            for call in turn.calls[:most]
        ]
        results = list(await asyncio.gather(*running))
        for _ in turn.calls[most:]:
            text = f"Not run: at most {most} calls of a turn are."
            results.append(ToolResult(ToolStatus.LIMIT, text))
        names = ", ".join(self._episode.task.tools)
        results += [
            ToolResult(ToolStatus.MODEL_ERROR, f"{line} The tools are: {names}.")
            for line in turn.malformed
        ]
        identities = [(call.call_id, self._known_name(call.name)) for call in turn.calls]
        identities += [(call_id(90_000_000 + i), _NO_TOOL) for i in range(len(turn.malformed))]
        return Observation(
            messages=tuple(
                result_message(identity, name, text=result.text)
                for (identity, name), result in zip(identities, results, strict=True)
            ),
            rewards=tuple(one.reward for one in results if one.reward is not None),
            statuses=tuple(one.status for one in results),
        )

    def _known_name(self, name: str) -> str:
        """Return the name of a tool; a name that the model made up is not repeated."""
        return name if name in self._tools else _NO_TOOL

    async def _ask_user(self) -> Observation:
        user, task = self._interaction, self._episode.task
        known = dict(task.extra_info.get("interaction_kwargs") or {})
        try:
            if self._user is None:
                identity = str(uuid4())
                await call_method(user.start_interaction, (identity,), known=known)
                self._user = identity
            is_over, answer, score, _ = await call_method(
                user.generate_response, (self._user, self._episode.messages), known=known
            )
            text, reward = read_return((answer, score))
            if len(text) > _MAX_CHARACTERS:
                raise ValueError(f"a message of {len(text)} characters fits into no conversation")
        except Exception as error:
            raise ToolFailed(f"the simulated user: {describe(error)}") from error
        rewards = () if reward is None else (reward,)
        messages = ({"role": "user", "content": text},)
        return Observation(() if is_over else messages, done=bool(is_over), rewards=rewards)


def load_interactions(specs: tuple[InteractionSpec, ...]) -> dict[str, Any]:
    """Make the simulated users of a run.

    Raises:
        UserError: a class cannot be imported or made.
    """
    made: dict[str, Any] = {}
    for spec in specs:
        kind = import_class(INTERACTION_KEY, spec.class_name)
        try:
            made[spec.name] = kind(config=dict(spec.config))
        except Exception as error:
            raise UserError(
                INTERACTION_KEY,
                spec.class_name,
                rule=f"cannot be made: {describe(error)}",
                remedy="Correct the class or its config.",
            ) from error
    return made


def interaction_of(task: Task, interactions: Mapping[str, Any]) -> Any:
    """Return the simulated user that a row names; None if the run has none."""
    if not interactions:
        return None
    name = str((task.extra_info.get("interaction_kwargs") or {}).get("name"))
    if name not in interactions:
        raise ToolFailed(
            f"the row names the interaction {name!r} in extra_info.interaction_kwargs.name, and "
            f"the file has {', '.join(interactions)}"
        )
    return interactions[name]
