# SPDX-License-Identifier: Apache-2.0
"""Environments behind OpenEnv's wire protocol: a session of a server for each episode.

A session is a WebSocket with messages in JSON: reset, step, close. The action of a turn is
its text, or the arguments of a call. A server that is full is asked again when a place is free; one
that fails or cannot be reached fails the episode, which then has no reward. An action against the
server's schema is the policy's mistake.
"""

from __future__ import annotations

import asyncio
import json
import os
import urllib.request
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any
from urllib.error import URLError

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus

from tandem.agents.setup import AGENTS_KEY, OpenEnvSpec, ServerFull, Task, ToolLimits
from tandem.agents.tools import cut_text
from tandem.data.call_formats import ToolSchema, call_id, result_message
from tandem.errors import UserError
from tandem.types import AssistantTurn, Observation, ToolStatus

_START_S = 10.0
_CLOSE_WAIT_S = 2.0
_MAX_MESSAGE_BYTES = 64 << 20
_FULL, _WRONG = "CAPACITY_REACHED", "VALIDATION_ERROR"
_OF_ALL_ACTIONS = "metadata"
_OF_ALL_OBSERVATIONS = ("done", "reward", "metadata")
_FIRST_MALFORMED = 90_000_000
_NO_TOOL = "none"


class ServerFailed(Exception):
    """The error of a server that cannot be reached, or whose environment raised."""


class ActionRefused(Exception):
    """The error of an action that is against the server's schema; its text is for the policy."""


class OpenEnvSession:
    """A session of a server, which is one environment."""

    def __init__(self, spec: OpenEnvSpec) -> None:
        self._spec = spec
        self._socket: ClientConnection | None = None

    async def reset(self, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Open the session and begin an episode; return what the server answers.

        Raises:
            ServerFull: the server has no place.
            ServerFailed: it cannot be reached, or its environment raised.
        """
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                self._socket = await _connect(self._spec)
        except TimeoutError as error:
            raise ServerFailed(self._late("connection")) from error
        return await self._ask("reset", data)

    async def step(self, action: Mapping[str, Any]) -> Mapping[str, Any]:
        """Act; return what the server answers. Raise ActionRefused, or ServerFailed."""
        return await self._ask("step", action)

    async def close(self) -> None:
        """End the session, and wait a moment until its place is free."""
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(ConnectionClosed):
                await socket.send(json.dumps({"type": "close"}))
            await socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._socket is None:
            raise ServerFailed("the session is not open")
        message = {"type": kind, "data": data}
        try:
            async with asyncio.timeout(self._spec.timeout_s):
                with suppress(ConnectionClosed):  # a server that is full says so, and closes
                    await self._socket.send(json.dumps(message))
                answer = json.loads(await self._socket.recv())
            content: Mapping[str, Any] = answer["data"]
            is_error = answer["type"] == "error"
        except TimeoutError as error:
            raise ServerFailed(self._late(kind)) from error
        except ConnectionClosed as error:
            cause = f"the connection has ended ({error})"
            raise ServerFailed(f"{self._spec.url}: {cause}") from error
        except (ValueError, LookupError, TypeError, RecursionError) as error:
            raise ServerFailed(f"{self._spec.url} does not speak OpenEnv's protocol") from error
        if is_error:
            raise self._error(kind, content)
        return content

    def _error(self, kind: str, content: Mapping[str, Any]) -> Exception:
        code, text = content.get("code"), str(content.get("message"))
        if code == _FULL:
            most = content.get("max_sessions")
            return ServerFull(text, most if isinstance(most, int) else None)
        if code == _WRONG and kind == "step":
            return ActionRefused("; ".join(_faults(content)) or text)
        return ServerFailed(f"{self._spec.url} answered {kind} with {code}: {text}")

    def _late(self, kind: str) -> str:
        return f"{self._spec.url}: no answer to {kind} within {self._spec.timeout_s:g} s"


async def _connect(spec: OpenEnvSpec) -> ClientConnection:
    scheme, _, rest = spec.url.partition("://")
    url = f"{'wss' if scheme == 'https' else 'ws'}://{rest}/ws"
    try:
        return await connect(
            url,
            additional_headers=dict(spec.headers),
            compression=None,
            proxy=None,
            open_timeout=None,
            ping_interval=None,  # a server that computes a step does not answer
            close_timeout=_CLOSE_WAIT_S,
            max_size=_MAX_MESSAGE_BYTES,
        )
    except OSError as error:
        cause = os.strerror(error.errno) if error.errno else str(error)
        raise ServerFailed(f"{url} cannot be reached: {cause}") from error
    except InvalidStatus as error:
        status = error.response.status_code
        raise ServerFailed(f"{url} is no WebSocket (HTTP status {status})") from error
    except InvalidHandshake as error:
        raise ServerFailed(f"{url} is no WebSocket ({error})") from error


class OpenEnvEpisode:
    """The environment of one episode; implements ``worker.EpisodeEnvironment``.

    Args:
        limits: the limits of calls, of which the length of an observation is read.
    """

    num_hung = 0
    is_stateful = True

    def __init__(self, task: Task, spec: OpenEnvSpec, *, limits: ToolLimits) -> None:
        self._task = task
        self._spec = spec
        self._limits = limits
        self._session = OpenEnvSession(spec)

    async def reset(self) -> Observation:
        """Begin the episode; raise ServerFull if the server has no place."""
        uid, sample = self._task.episode_id
        own = self._task.extra_info.get("reset_kwargs") or {}
        known = {"seed": self._task.seed, "episode_id": f"{uid}-{sample}"}
        try:
            answer = await self._session.reset({**known, **self._spec.reset, **own})
        except ServerFull:
            await self._session.close()
            raise
        except ServerFailed as error:
            return _failure(error)
        if answer.get("done"):
            return _failure("the environment has ended the episode before the first action")
        return self._observation(answer, role="user")

    async def step(self, turn: AssistantTurn) -> Observation:
        """Act as a turn says; a turn without an action ends the episode."""
        if self._spec.action_field is not None:
            action: Mapping[str, Any] = {self._spec.action_field: turn.text}
            return await self._act(action, role="user")
        if not turn.calls:
            return self._answer_malformed(turn) if turn.malformed else Observation(done=True)
        first, *others = turn.calls
        if first.name != self._spec.tool:
            text = f"Unknown tool {first.name[:80]!r}. The tools are: {self._spec.tool}."
            return self._tell(turn, [(ToolStatus.MODEL_ERROR, text)] * len(turn.calls))
        observation = await self._act(json.loads(first.arguments), role="tool", call=first.call_id)
        if observation.done:
            return observation
        text = "Not run: at most 1 calls of a turn are."
        told = self._tell(turn, [(ToolStatus.LIMIT, text)] * len(others), skipped=1)
        return Observation(
            (*observation.messages, *told.messages),
            rewards=observation.rewards,
            statuses=(*observation.statuses, *told.statuses),
        )

    async def close(self) -> str:
        """End the session."""
        await self._session.close()
        return ""

    async def _act(self, action: Mapping[str, Any], *, role: str, call: str = "") -> Observation:
        try:
            answer = await self._session.step(action)
        except ActionRefused as error:
            text = f"The action is wrong: {error}."
            message = self._message(text, role=role, call=call)
            return Observation((message,), statuses=(ToolStatus.MODEL_ERROR,))
        except (ServerFull, ServerFailed) as error:
            return _failure(error)
        return self._observation(answer, role=role, call=call)

    def _observation(self, answer: Mapping[str, Any], *, role: str, call: str = "") -> Observation:
        seen, reward, done = answer.get("observation"), answer.get("reward"), answer.get("done")
        text = _text_of(seen, self._spec.observation_field)
        if text is None:
            field, names = self._spec.observation_field, ", ".join(_names(seen))
            return _failure(f"an observation has no field {field!r}; it has {names}")
        is_number = isinstance(reward, int | float)
        is_reset = role == "user" and not call
        return Observation(
            (self._message(text, role=role, call=call),) if text or not is_reset else (),
            done=bool(done),
            rewards=(float(reward),) if is_number else (),
            statuses=(ToolStatus.OK,),
        )

    def _message(self, text: str, *, role: str, call: str) -> Mapping[str, Any]:
        text = text.encode(errors="replace").decode()
        most = self._limits.max_observation_characters
        if most is not None:
            text = cut_text(text, most, side=self._limits.truncate_side)
        if role == "tool":
            return result_message(call, self._spec.tool, text=text)
        return {"role": "user", "content": text}

    def _tell(
        self, turn: AssistantTurn, told: list[tuple[ToolStatus, str]], *, skipped: int = 0
    ) -> Observation:
        """Answer calls that are not actions, and malformed ones."""
        calls = turn.calls[skipped:]
        messages = [
            result_message(call.call_id, self._spec.tool, text=text)
            for call, (_, text) in zip(calls, told, strict=True)
        ]
        malformed = self._answer_malformed(turn)
        return Observation(
            (*messages, *malformed.messages),
            statuses=(*(status for status, _ in told), *malformed.statuses),
        )

    def _answer_malformed(self, turn: AssistantTurn) -> Observation:
        lines = [f"{line} The tools are: {self._spec.tool}." for line in turn.malformed]
        return Observation(
            tuple(
                result_message(call_id(_FIRST_MALFORMED + i), _NO_TOOL, text=line)
                for i, line in enumerate(lines)
            ),
            statuses=(ToolStatus.MODEL_ERROR,) * len(lines),
        )


def read_action_schemas(specs: Iterable[OpenEnvSpec]) -> dict[str, ToolSchema | None]:
    """Ask each server for its health, and for the schema of its actions.

    Returns:
        The tool by which the policy acts in each environment; None where its text is the action.

    Raises:
        UserError: a server cannot be reached, or has no schema of actions.
    """
    schemas: dict[str, ToolSchema | None] = {}
    for spec in specs:
        try:
            _get(spec, "/health")
            schemas[spec.name] = None if spec.action_field is not None else _tool_of(spec)
        except (OSError, ValueError, LookupError, TypeError) as error:
            cause = error.reason if isinstance(error, URLError) else error
            if isinstance(cause, OSError) and cause.strerror:
                cause = cause.strerror
            rule = f"the server {spec.url} cannot be used: {cause}"
            remedy = "Start it, or correct its url."
            raise UserError(AGENTS_KEY, spec.name, rule=rule, remedy=remedy) from error
    return schemas


def _tool_of(spec: OpenEnvSpec) -> ToolSchema:
    action = dict(_get(spec, "/schema")["action"])
    properties = {k: v for k, v in action["properties"].items() if k != _OF_ALL_ACTIONS}
    described = str(action.get("description") or "Act in the environment.")
    parameters = {**action, "properties": properties}
    function = {"name": spec.tool, "description": described, "parameters": parameters}
    return {"type": "function", "function": function}


def _get(spec: OpenEnvSpec, path: str) -> Any:
    request = urllib.request.Request(spec.url + path, headers=dict(spec.headers))
    with urllib.request.urlopen(request, timeout=_START_S) as answer:
        return json.load(answer)


def _faults(content: Mapping[str, Any]) -> Iterable[str]:
    for error in content.get("errors") or ():
        place = ".".join(map(str, error.get("loc") or ()))
        yield f"{place}: {error.get('msg')}" if place else str(error.get("msg"))


def _text_of(observation: Any, field: str | None) -> str | None:
    """Return what the policy reads of an observation; None if it lacks the field."""
    if field is None:
        own = observation
        if isinstance(observation, dict):
            own = {k: v for k, v in observation.items() if k not in _OF_ALL_OBSERVATIONS}
        return own if isinstance(own, str) else json.dumps(own, ensure_ascii=False)
    if not isinstance(observation, dict) or field not in observation:
        return None
    found = observation[field]
    return found if isinstance(found, str) else json.dumps(found, ensure_ascii=False)


def _names(observation: Any) -> Iterable[str]:
    return map(str, observation) if isinstance(observation, dict) else ("no fields",)


def _failure(cause: Exception | str) -> Observation:
    return Observation(done=True, statuses=(ToolStatus.FAILED,), detail=str(cause))
