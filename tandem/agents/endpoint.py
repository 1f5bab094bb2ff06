# SPDX-License-Identifier: Apache-2.0
"""The endpoint that agents call as they would call OpenAI's: HTTP on this host, a key an episode.

It listens on a loopback address only and refuses requests without the key of an episode under way.
It speaks chat completions, whole or streamed, and knows neither tokens nor models: a
``ChatSession`` answers. A client that hangs up does not stop the turn; one that asks again gets the
same turn.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import h11

from tandem.agents.chat import (
    ChatRequest,
    ChatSession,
    CompletionWriter,
    PendingReply,
    RequestRefused,
    read_chat_request,
)
from tandem.agents.setup import Access
from tandem.errors import UserError

ENDPOINT_KEY = "actor_rollout_ref.rollout.agent.endpoint"
MODEL = "policy"
"""The name of the model; requests may name any other."""
MAX_BODY_BYTES = 64 << 20
KEEP_ALIVE_S = 3.0
"""The seconds between two comments of a stream whose turn is still being drawn."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_CHAT, _MODELS, _HEALTH = "/v1/chat/completions", "/v1/models", "/health"
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


def read_address(value: str | None) -> tuple[str, int]:
    """Return host and port of ``agent.endpoint``; port 0 is any free one.

    Raises:
        UserError: it is no HOST:PORT, or the host is not this machine.
    """
    if value is None:
        return _LOOPBACK[0], 0
    host, _, port = value.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        rule = "is not HOST:PORT"
        raise UserError(ENDPOINT_KEY, value, rule=rule, remedy="Set it to 127.0.0.1:8000, say.")
    host = host.strip("[]")
    if host not in _LOOPBACK:
        rule = "is not an address of this machine alone, and agents run here"
        raise UserError(ENDPOINT_KEY, value, rule=rule, remedy=f"Set it to 127.0.0.1:{port}.")
    return host, int(port)


def check_address(address: tuple[str, int]) -> None:
    """Raise UserError if nothing can listen at an address now, as its port is in use."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
        except OSError as error:
            raise _in_use(address, error) from error


def _in_use(address: tuple[str, int], error: OSError) -> UserError:
    shown = f"{address[0]}:{address[1]}"
    cause = os.strerror(error.errno) if error.errno else str(error)
    rule = f"cannot be listened on ({cause})"
    remedy = "Set another port, or leave it out for any free one."
    return UserError(ENDPOINT_KEY, shown, rule=rule, remedy=remedy)


class Endpoint:
    """The server of a run.

    Args:
        name_once: is called with each field that a request sets without effect.

    Example:
        >>> async with open_endpoint(("127.0.0.1", 0), name_once=print) as endpoint:
        ...     access = endpoint.admit(session)
        ...     endpoint.close(access)
    """

    def __init__(self, *, name_once: Callable[[str], None]) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._base_url = ""
        self._name_once = name_once

    def admit(self, session: ChatSession) -> Access:
        """Return a new key, with which requests reach ``session``."""
        key = f"tandem-{secrets.token_urlsafe(24)}"
        self._sessions[key] = session
        return Access(self._base_url, key, MODEL)

    def close(self, access: Access) -> None:
        """Refuse the key from now on."""
        self._sessions.pop(access.api_key, None)

    def listen(self, host: str, port: int) -> None:
        """Note the address under which the server is reached."""
        shown = f"[{host}]" if ":" in host else host
        self._base_url = f"http://{shown}:{port}/v1"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        connection = _Connection(reader, writer)
        try:
            while (request := await connection.receive()) is not None:
                await self._answer(request, connection)
                if not connection.is_reusable():
                    break
        except (ConnectionError, h11.RemoteProtocolError):
            pass  # the client is gone, or does not speak HTTP
        except RequestRefused as error:
            await connection.send_json(error.status, error.body())
        finally:
            writer.close()

    async def _answer(self, request: _Request, connection: _Connection) -> None:
        session = None
        try:
            if request.path == _HEALTH:
                await connection.send_json(200, {"status": "ok"})
                return
            session = self._session_of(request)
            if request.path == _MODELS and request.method in ("GET", "HEAD"):
                await connection.send_json(200, _models())
                return
            _require_chat(request)
            retries = request.headers.get("x-stainless-retry-count", "")
            num_retries = int(retries) if retries.isdecimal() else 0
            chat = read_chat_request(request.body, num_retries=num_retries)
            for name in chat.without_effect:
                self._name_once(name)
            pending = session.request(chat)
            await _send_reply(pending, chat, connection=connection)
        except RequestRefused as error:
            if session is not None:
                session.refuse(error)
            await connection.send_json(error.status, error.body())

    def _session_of(self, request: _Request) -> ChatSession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        session = self._sessions.get(key.strip()) if scheme.lower() == "bearer" else None
        if session is None:
            rule = "no key" if not key else "the key is of no episode that is under way"
            raise RequestRefused(rule, status=401, code="invalid_api_key")
        return session


def _require_chat(request: _Request) -> None:
    if request.path != _CHAT:
        rule = f"{request.path} is not built: the endpoint has {_CHAT} and {_MODELS}"
        raise RequestRefused(rule, status=404)
    if request.method != "POST":
        raise RequestRefused(f"{_CHAT} takes POST, not {request.method}", status=405)


def _models() -> dict[str, Any]:
    model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "tandem"}
    return {"object": "list", "data": [model]}


async def _send_reply(pending: PendingReply, chat: ChatRequest, *, connection: _Connection) -> None:
    """Send a turn when it is drawn; a client that hangs up before has not got it."""
    writer = CompletionWriter(
        f"chatcmpl-{secrets.token_hex(12)}", int(time.time()), MODEL, chat.shows_usage
    )
    try:
        if not chat.is_streamed:
            reply = await connection.wait(pending.reply())
            await connection.send_json(200, writer.whole(reply))
        else:
            await _stream_reply(pending, writer, connection=connection)
    except ConnectionError:
        pending.hang_up()
        raise
    pending.confirm()


async def _stream_reply(
    pending: PendingReply, writer: CompletionWriter, *, connection: _Connection
) -> None:
    await connection.begin_stream()
    try:
        reply = await connection.wait(pending.reply(), every_s=KEEP_ALIVE_S)
    except RequestRefused as error:
        await connection.send_event(json.dumps(error.body()))
        raise ConnectionAbortedError("the stream has begun, and there is no turn") from error
    for event in writer.events(reply):
        await connection.send_event(json.dumps(event))
    await connection.send_event("[DONE]")
    await connection.end_stream()


class _Connection:
    """A connection in HTTP/1.1. If the client is gone, its methods raise ConnectionError."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._http = h11.Connection(h11.SERVER)
        self._is_head = False

    async def receive(self) -> _Request | None:
        """Return the next request; None at the end. Raise RequestRefused if it is too large."""
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                if self._http.they_are_waiting_for_100_continue:
                    await self._send(h11.InformationalResponse(status_code=100, headers=[]))
                self._http.receive_data(await self._reader.read(_READ_BYTES))
            elif isinstance(event, h11.Request):
                head = event
                self._is_head = event.method == b"HEAD"
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > MAX_BODY_BYTES:
                    rule = f"the body is larger than {MAX_BODY_BYTES >> 20} MiB"
                    raise RequestRefused(rule, status=413)
            elif isinstance(event, h11.EndOfMessage) and head is not None:
                headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
                path = head.target.decode("latin-1").partition("?")[0]
                return _Request(head.method.decode(), path.rstrip("/"), headers, bytes(body))
            else:
                return None

    def is_reusable(self) -> bool:
        """Return whether the connection may carry another request, and prepare it for one."""
        if self._http.our_state is not h11.DONE or self._http.their_state is not h11.DONE:
            return False
        self._http.start_next_cycle()
        return True

    async def wait(self, turn: Any, *, every_s: float | None = None) -> Any:
        """Wait for a turn while the client does; write a comment every ``every_s`` seconds.

        Raises:
            ConnectionError: the client has hung up, or its episode has ended.
        """
        drawing = asyncio.ensure_future(turn)
        listening = asyncio.ensure_future(self._reader.read(_READ_BYTES))
        try:
            while True:
                await asyncio.wait(
                    (drawing, listening), timeout=every_s, return_when=asyncio.FIRST_COMPLETED
                )
                if drawing.cancelled():
                    raise ConnectionAbortedError("the episode has ended before its turn")
                if listening.done():
                    self._take_early(listening.result())
                    listening = asyncio.ensure_future(self._reader.read(_READ_BYTES))
                elif not drawing.done():
                    await self._send(h11.Data(data=b": waiting\n\n"))
                if drawing.done():
                    return drawing.result()
        finally:
            await _cancel(listening)
            if not drawing.done():
                await _cancel(drawing)

    def _take_early(self, received: bytes) -> None:
        """Keep the next request, or raise: nobody would get a turn that is drawn by now."""
        if not received:
            raise ConnectionAbortedError("the client has hung up")
        self._http.receive_data(received)

    async def send_json(self, status: int, content: Mapping[str, Any]) -> None:
        """Send a whole answer; to HEAD, its head alone."""
        if self._http.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # a stream has begun, or the connection is broken
        body = json.dumps(content).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
        await self._send(h11.Response(status_code=status, headers=headers))
        if not self._is_head:
            await self._send(h11.Data(data=body))
        await self._send(h11.EndOfMessage())

    async def begin_stream(self) -> None:
        """Send the head of an answer in events."""
        headers = [("content-type", "text/event-stream"), ("cache-control", "no-cache")]
        await self._send(h11.Response(status_code=200, headers=headers))

    async def send_event(self, data: str) -> None:
        """Send one event."""
        await self._send(h11.Data(data=f"data: {data}\n\n".encode()))

    async def end_stream(self) -> None:
        """End an answer in events."""
        await self._send(h11.EndOfMessage())

    async def _send(self, event: Any) -> None:
        self._writer.write(self._http.send(event) or b"")
        await self._writer.drain()


async def _cancel(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait((task,))
    if not task.cancelled():
        task.exception()  # else asyncio reports that nobody has looked


@asynccontextmanager
async def open_endpoint(
    address: tuple[str, int], *, name_once: Callable[[str], None]
) -> AsyncIterator[Endpoint]:
    """Yield the endpoint of a run, which is reached as long as the context lasts.

    Raises:
        UserError: the port is in use.
    """
    endpoint = Endpoint(name_once=name_once)
    serving: dict[asyncio.Task[Any], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "a connection is served in a task of its own"
        serving[task] = writer
        try:
            await endpoint.serve(reader, writer)
        finally:
            del serving[task]

    try:
        server = await asyncio.start_server(serve, *address)
    except OSError as error:
        raise _in_use(address, error) from error
    endpoint.listen(address[0], server.sockets[0].getsockname()[1])
    try:
        yield endpoint
    finally:
        server.close()
        for writer in serving.values():
            writer.transport.abort()
        if serving:
            await asyncio.wait(list(serving))
        await server.wait_closed()
