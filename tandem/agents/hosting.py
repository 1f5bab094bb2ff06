# SPDX-License-Identifier: Apache-2.0
"""Agents that are functions of the user, in a child process that plays many episodes at once.

A coroutine runs on the event loop of the process, a plain function in a thread of its own. What a
plain function returns is awaited if it can be: it may be a decorated coroutine function. An
exception fails the episode. An agent that is stopped is cancelled; a thread cannot be, and is
counted, so that its process gets no further episodes.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.agents.setup import AGENTS_KEY, Access, ProgramSpec, Task
from tandem.agents.tools import UNFINISHED, ToolEpisode, guard, run_in_thread
from tandem.config.schema.imports import describe
from tandem.errors import UserError

_STOP_WAIT_S = 2.0
_GIVEN = (None, None)
"""Stands for the task and the endpoint where the arguments of an agent are checked."""


@dataclass(frozen=True, slots=True)
class Play:
    """An episode to play by the agent ``name``."""

    name: str
    task: Task
    access: Access


class HostedAgents:
    """The agents of this process.

    Raises:
        UserError: an agent cannot be imported, or takes other arguments.
    """

    def __init__(self, specs: Sequence[ProgramSpec]) -> None:
        self._agents = {spec.name: (_load(spec), spec.arguments) for spec in specs if spec.target}
        self._playing: dict[tuple[int, int], tuple[asyncio.Task[Any], ToolEpisode]] = {}

    async def play(self, play: Play) -> dict[str, Any]:
        """Play an episode; return ``returned``, or ``failure`` with ``traceback``.

        ``returned`` has only what JSON has.
        """
        function, arguments = self._agents[play.name]
        episode = ToolEpisode(play.task, [])
        playing = asyncio.ensure_future(_call(function, play, arguments=arguments, episode=episode))
        self._playing[play.task.episode_id] = playing, episode
        await asyncio.wait((playing,))
        self._playing.pop(play.task.episode_id, None)
        if playing.cancelled():
            return {"failure": "the agent was stopped"}
        error = playing.exception()
        if error is None:
            return {"returned": playing.result()}
        text = "".join(traceback.format_exception(error))
        return {"failure": describe(error), "traceback": text}

    async def stop(self, episode_id: tuple[int, int]) -> int:
        """Stop an agent; return how many threads of it still run."""
        if episode_id not in self._playing:
            return 0
        playing, episode = self._playing.pop(episode_id)
        playing.cancel()
        _, still = await asyncio.wait((playing,), timeout=_STOP_WAIT_S)
        return episode.num_hung + len(still)


async def _call(
    function: Callable[..., Any],
    play: Play,
    *,
    arguments: Mapping[str, Any],
    episode: ToolEpisode,
) -> Any:
    if inspect.iscoroutinefunction(function):
        returned = await guard(function(play.task, play.access, **arguments))
    else:
        work = partial(function, play.task, play.access, **arguments)
        returned = await run_in_thread(work, episode)
    if isinstance(returned, UNFINISHED):
        kind = type(returned).__name__
        raise TypeError(f"it returned an object of the type {kind}, which nothing runs")
    try:
        return json.loads(json.dumps(returned, default=_as_plain))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"what it returned cannot be written as JSON: {error}") from error


def _as_plain(value: Any) -> Any:
    """Return a number such as NumPy's as a float, and any other value as text."""
    if hasattr(value, "__float__"):
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError, ArithmeticError):  # an array, for example
            pass
    return str(value)


def _load(spec: ProgramSpec) -> Callable[..., Any]:
    module_name, _, own = spec.target.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), own)
    except (Exception, SystemExit) as error:
        rule = f"{spec.target} cannot be imported: {describe(error)}"
        remedy = "Correct _target_, or add its folder to PYTHONPATH."
        raise UserError(AGENTS_KEY, spec.name, rule=rule, remedy=remedy) from error
    if inspect.isclass(found):
        rule = f"{spec.target} is a class, and an agent is a function of a task and an endpoint"
        remedy = "Write the loop as a function that calls the endpoint; see docs/agents.md."
        raise UserError(AGENTS_KEY, spec.name, rule=rule, remedy=remedy)
    try:
        inspect.signature(found).bind(*_GIVEN, **spec.arguments)
    except TypeError as error:
        rule = f"{spec.target} cannot be called with (task, endpoint, **fields): {error}"
        remedy = "Correct the function, or the fields of its entry."
        raise UserError(AGENTS_KEY, spec.name, rule=rule, remedy=remedy) from error
    return found
