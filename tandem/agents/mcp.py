# SPDX-License-Identifier: Apache-2.0
"""Tools of servers that speak the Model Context Protocol: programs, and servers with a URL.

It speaks the protocol's versions that begin with ``initialize``, over standard input and output or
streamable HTTP. A server that is lost, or that answers with an error of HTTP, is connected once
more, and the call is tried again; other calls end over the old connection. If that fails, or the
server was the episode's own, the tool has failed and the episode has no reward. One that answers
nothing any more after a call ran out of its time is connected anew for other calls. An error that a
tool reports is the policy's to read.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol

import httpx

from tandem.agents.json_rpc import (
    INVALID_PARAMS,
    MAX_MESSAGE_BYTES,
    VERSION,
    RpcLost,
    RpcRefused,
    answer_request,
    read_result,
    start_program,
)
from tandem.agents.setup import TOOL_KEY, ServedTools, ServerSpec
from tandem.agents.tools import LoadedTool, ToolEpisode, ToolMistake
from tandem.data.call_formats import ToolSchema
from tandem.errors import UserError

PROTOCOLS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")
"""The versions of the protocol that are spoken; the first one is offered."""
START_S = 45.0
"""The time in which all servers of a process must be ready."""
PING_S = 3.0
"""The time in which a server must answer whether it lives."""
_NO_SCHEMA: Mapping[str, Any] = {"type": "object", "properties": {}}
_SESSION, _PROTOCOL = "mcp-session-id", "mcp-protocol-version"
_ACCEPTED = "application/json, text/event-stream"
_EVENTS = "text/event-stream"
_MAX_PAGES = 100
_REDIRECT, _CLIENT_ERROR, _NO_SESSION, _SERVER_ERROR = 300, 400, 404, 500


class Channel(Protocol):
    """A way to ask a server."""

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Any: ...

    async def notify(self, method: str) -> None: ...

    async def close(self) -> None: ...


class _ProgramChannel:
    """A server that is a program of this process."""

    def __init__(self, program: Any) -> None:
        self.ask, self._tell, self.close = program.ask, program.tell, program.close

    async def notify(self, method: str) -> None:
        self._tell(method)


class _WebChannel:
    """A server with a URL: each message is a request, answered with JSON or with events."""

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        # Calls have deadlines of their own.
        self._client = httpx.AsyncClient(headers=spec.headers, timeout=None)
        self._own: dict[str, str] = {}
        self._num_asked = 0

    async def ask(self, method: str, params: Mapping[str, Any] | None = None) -> Any:
        """Ask a question and return its result; see ``RpcProgram.ask``."""
        self._num_asked += 1
        number = self._num_asked
        answer = await self._send({"id": number, "method": method, "params": params or {}})
        if answer is None:
            raise RpcLost(f"{self._spec.url} gave no answer to {method}")
        result = read_result(answer)
        if method == "initialize" and isinstance(result, dict):
            self._own[_PROTOCOL] = str(result.get("protocolVersion"))
        return result

    async def notify(self, method: str) -> None:
        """Send what needs no answer."""
        await self._send({"method": method})

    async def close(self) -> None:
        """End the session, if the server has one for us."""
        if _SESSION in self._own:
            with suppress(httpx.HTTPError):  # a session that cannot be ended will expire
                await self._client.delete(self._spec.url, headers=self._own, timeout=2.0)
        await self._client.aclose()

    async def _send(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        headers = {**self._own, "accept": _ACCEPTED}
        content = {"jsonrpc": VERSION, **message}
        request = self._client.stream("POST", self._spec.url, json=content, headers=headers)
        try:
            async with request as response:
                if session := response.headers.get(_SESSION):
                    self._own[_SESSION] = session
                return await self._read(response, number=message.get("id"))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            cause = str(error) or type(error).__name__
            raise RpcLost(f"{self._spec.url} cannot be reached: {cause}") from error

    async def _read(self, response: httpx.Response, *, number: Any) -> Mapping[str, Any] | None:
        """Return the answer to a question, or None if there is none."""
        status = response.status_code
        told = f"{self._spec.url} answered with HTTP status {status}"
        if _REDIRECT <= status < _CLIENT_ERROR:
            # Followed, it could lead the headers of the entry, a key among them, to others.
            to = response.headers.get("location")
            raise RpcLost(f"{told}, a redirect to {to}; name the address that it leads to as url")
        if status == _NO_SESSION or status >= _SERVER_ERROR:
            raise RpcLost(told)
        kind = response.headers.get("content-type", "")
        if kind.startswith(_EVENTS):
            return await self._read_events(response, number=number)
        body = b""
        async for part in response.aiter_bytes():
            body += part
            if len(body) > MAX_MESSAGE_BYTES:
                raise RpcLost(f"{self._spec.url} answered with more than {MAX_MESSAGE_BYTES} bytes")
        answer = _message(body)
        if answer is not None and ("result" in answer or "error" in answer):
            return answer
        if status >= _CLIENT_ERROR:
            raise RpcLost(told)
        return None

    async def _read_events(
        self, response: httpx.Response, *, number: Any
    ) -> Mapping[str, Any] | None:
        """Read events up to the answer; requests of the server in between are answered."""
        data: list[str] = []
        num_characters = 0
        async for line in response.aiter_lines():
            if line.startswith("data:"):
                data.append(line[5:].removeprefix(" "))
                num_characters += len(line)
                if num_characters > MAX_MESSAGE_BYTES:
                    raise RpcLost(f"{self._spec.url} sent more than {MAX_MESSAGE_BYTES} bytes")
            if line:
                continue
            message, data = _message("\n".join(data).encode()), []
            if message is None:
                continue
            if "method" in message and "id" in message:
                await self._send(answer_request(message))
            elif message.get("id") == number and "method" not in message:
                return message
        return None


class McpServer:
    """A server, connected when it is first asked and again if the connection is lost.

    Args:
        keeps_state: whether a lost connection takes the state of an episode with it.
        ping_s: the time in which it must answer a ping, once a call has run out of its time.
    """

    def __init__(
        self, spec: ServerSpec, *, keeps_state: bool = False, ping_s: float = PING_S
    ) -> None:
        self.spec = spec
        self._keeps_state = keeps_state
        self._channel: Channel | None = None
        self._num_under_way: Counter[Channel] = Counter()
        self._given_up: set[Channel] = set()
        self._connecting = asyncio.Lock()
        self._ping_s = ping_s
        self._check: asyncio.Task[None] | None = None

    async def list_tools(self) -> list[Mapping[str, Any]]:
        """Return what the server says about its tools; raise RpcRefused or RpcLost."""
        tools: list[Mapping[str, Any]] = []
        params: dict[str, Any] = {}
        for _ in range(_MAX_PAGES):
            page = await _ask(await self._connected(), "tools/list", params=params)
            tools += page.get("tools") or ()
            if not page.get("nextCursor"):
                return tools
            params = {"cursor": page["nextCursor"]}
        raise RpcLost(f"its list of tools has more than {_MAX_PAGES} pages")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Call a tool; if the connection is lost, once more over a new one.

        If this is cancelled, the server is asked whether it lives. One that does not answer is
        connected anew for the next call.
        The old connection is closed when the last call over it has ended: others may still get
        their answers, as a server may refuse one request and go on with the next.

        Raises:
            RpcRefused: the server refuses the call.
            RpcLost: the server cannot be reached, or the state of the episode was lost with it.
        """
        params = {"name": name, "arguments": dict(arguments)}
        channel = await self._connected()
        try:
            return await self._call_over(channel, params)
        except RpcLost:
            if self._keeps_state:
                raise  # a new connection would begin from another state
            await self._give_up(channel)
        return await self._call_over(await self._connected(), params)

    async def close(self) -> None:
        """End the connection, and the program."""
        if self._check is not None:
            self._check.cancel()
            await asyncio.wait((self._check,))
        channels = [*self._given_up, *([] if self._channel is None else [self._channel])]
        self._channel = None
        self._given_up.clear()
        for channel in channels:
            await channel.close()

    async def _call_over(self, channel: Channel, params: Mapping[str, Any]) -> Mapping[str, Any]:
        self._num_under_way[channel] += 1
        try:
            return await _ask(channel, "tools/call", params=params)
        except asyncio.CancelledError:
            is_checked = self._check is not None and not self._check.done()
            if channel is self._channel and not self._keeps_state and not is_checked:
                checking = self._require_life(channel)
                self._check = asyncio.get_running_loop().create_task(checking)
            raise
        finally:
            self._num_under_way[channel] -= 1
            await self._close_unused(channel)

    async def _require_life(self, channel: Channel) -> None:
        """Give a connection up if nobody answers a ping."""
        try:
            async with asyncio.timeout(self._ping_s):
                await channel.ask("ping")
        except RpcRefused:
            pass  # that is an answer
        except (TimeoutError, RpcLost):
            await self._give_up(channel)

    async def _give_up(self, channel: Channel) -> None:
        if self._channel is channel:
            self._channel = None
            self._given_up.add(channel)
            await self._close_unused(channel)

    async def _close_unused(self, channel: Channel) -> None:
        if channel in self._given_up and not self._num_under_way[channel]:
            self._given_up.remove(channel)
            del self._num_under_way[channel]
            await channel.close()

    async def _connected(self) -> Channel:
        if self._check is not None:
            await asyncio.wait((self._check,))
        async with self._connecting:
            if self._channel is None:
                self._channel = await self._connect()
            return self._channel

    async def _connect(self) -> Channel:
        spec = self.spec
        if spec.command:
            program = await start_program(
                spec.command, environment=spec.variables, folder=spec.folder
            )
            channel: Channel = _ProgramChannel(program)
        else:
            channel = _WebChannel(spec)
        client = {"name": "tandem", "version": "1"}
        offer = {"protocolVersion": PROTOCOLS[0], "capabilities": {}, "clientInfo": client}
        try:
            greeting = await channel.ask("initialize", offer)
            version = greeting.get("protocolVersion") if isinstance(greeting, dict) else None
            if version not in PROTOCOLS:
                raise RpcLost(f"it speaks the protocol's version {version}, which is not built")
            await channel.notify("notifications/initialized")
        except BaseException:
            await channel.close()
            raise
        return channel


async def _ask(channel: Channel, method: str, *, params: Mapping[str, Any]) -> Mapping[str, Any]:
    result = await channel.ask(method, params)
    if not isinstance(result, dict):
        raise RpcLost(f"its answer to {method} is no object")
    return result


class ServedTool:
    """A tool of a server; implements ``tools.LoadedTool``.

    Args:
        described: what the server says about the tool.
    """

    def __init__(
        self, server: McpServer, described: Mapping[str, Any], *, served: ServedTools
    ) -> None:
        self._server = server
        self._name = str(described["name"])
        self._key = f"server {server.spec.name}"
        self.is_stateful = served.is_per_episode
        self.timeout_s = served.timeout_s
        self.schema: ToolSchema = {
            "type": "function",
            "function": {
                "name": self._name,
                "description": str(described.get("description") or ""),
                "parameters": described.get("inputSchema") or dict(_NO_SCHEMA),
            },
        }

    async def call(self, arguments: dict[str, Any], episode: ToolEpisode) -> Any:
        """Call the tool; raise ToolMistake with what it reports as an error."""
        server = self._server
        if self.is_stateful:
            server = episode.instances.setdefault(
                self._key, McpServer(server.spec, keeps_state=True)
            )
        try:
            result = await server.call(self._name, arguments)
        except RpcRefused as error:
            if error.code == INVALID_PARAMS:
                raise ToolMistake(str(error)) from error
            raise
        text = text_of_result(result)
        if result.get("isError"):
            raise ToolMistake(text)
        return text

    async def release(self, episode: ToolEpisode) -> None:
        """End the connection of the episode, if it has one of its own."""
        server = episode.instances.pop(self._key, None)
        if server is not None:
            await server.close()


def text_of_result(result: Mapping[str, Any]) -> str:
    """Return the text of a result: its parts, or else its structured content as JSON.

    Raises:
        TypeError: it holds a picture or a sound, which a policy of text cannot read.
    """
    texts: list[str] = []
    for part in result.get("content") or ():
        kind = part.get("type")
        inner = part.get("resource") if kind == "resource" else None
        if kind == "text":
            texts.append(str(part.get("text", "")))
        elif isinstance(inner, dict) and "text" in inner:
            texts.append(str(inner["text"]))
        elif kind == "resource_link":
            texts.append(str(part.get("uri", "")))
        else:
            raise TypeError(f"a tool returned content of the type {kind!r}, and models read text")
    if not texts and "structuredContent" in result:
        return json.dumps(result["structuredContent"], ensure_ascii=False)
    return "\n".join(texts)


async def connect_tools(served: Sequence[ServedTools]) -> list[LoadedTool]:
    """Connect to servers, and return those of their tools that a run uses.

    Raises:
        UserError: a server does not answer in time, or lacks a tool that was selected.
    """
    tools: list[LoadedTool] = []
    for one in served:
        found: list[str] = []
        for spec in one.servers:
            ping_s = PING_S if one.timeout_s is None else min(PING_S, one.timeout_s / 3)
            server = McpServer(spec, ping_s=ping_s)
            for described in await _describe_tools(server, one, tools=tools):
                found.append(described)
        missing = [name for name in one.selected if name not in found]
        if missing:
            rule = f"the servers have no tool {missing[0]!r}; they have {', '.join(found)}"
            remedy = "Correct tool_selected_list."
            raise UserError(TOOL_KEY, rule=rule, remedy=remedy)
    return tools


async def _describe_tools(
    server: McpServer, served: ServedTools, *, tools: list[LoadedTool]
) -> list[str]:
    """Add the tools of a server that are used to ``tools``; return the names of all it has."""
    spec = server.spec
    try:
        async with asyncio.timeout(START_S):
            described = await server.list_tools()
        names = [str(one["name"]) for one in described]
    except (TimeoutError, RpcRefused, RpcLost, LookupError, TypeError) as error:
        cause = f"no answer within {START_S:g} s" if isinstance(error, TimeoutError) else str(error)
        rule = f"the server {spec.name} cannot be used: {cause}"
        remedy = "Try its command or URL by hand; what it prints is above, or in environments.log."
        raise UserError(TOOL_KEY, rule=rule, remedy=remedy) from error
    chosen = served.selected or names
    tools += [ServedTool(server, one, served=served) for one in described if one["name"] in chosen]
    if served.is_per_episode:
        await server.close()
    return names


def _message(body: bytes) -> Mapping[str, Any] | None:
    """Return a message in JSON; None if it is none."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
