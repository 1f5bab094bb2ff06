# SPDX-License-Identifier: Apache-2.0
"""Messages between a run and the workers of a server: JSON behind its length.

The workers connect to the run, because the run knows the server's address and not the other way
round. A token proves that it is the server that was asked. torch is not imported.
"""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from hmac import compare_digest
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from tandem.rollout.attached.server import Exchange, Server, ServerLost

_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 64 << 20
_MIN_WAIT_S = 0.001
CONNECT_S = 60.0
"""How long the workers of a server may take to connect."""
_PROOF_S, _MAX_PROOF_BYTES = 5.0, 256
"""How long a new connection may take to prove who it is, and with how long a message."""


def send_message(channel: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message."""
    data = json.dumps(message).encode()
    channel.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def receive_message(
    channel: socket.socket,
    *,
    max_bytes: int = _MAX_MESSAGE_BYTES,
    deadline: float | None = None,
) -> dict[str, Any]:
    """Wait for one message.

    Args:
        deadline: when the whole message must be there, by ``time.monotonic``; None: the time limit
            of the channel applies to each part.

    Raises:
        ConnectionError: the other side has ended, or does not speak this protocol.
    """
    length = bytearray(_LENGTH_BYTES)
    receive_into(channel, memoryview(length), deadline=deadline)
    num_bytes = int.from_bytes(length, "big")
    if num_bytes > max_bytes:
        raise ConnectionError("the message is too long")
    data = bytearray(num_bytes)
    receive_into(channel, memoryview(data), deadline=deadline)
    try:
        message = json.loads(data)
    except ValueError as error:
        raise ConnectionError("the message is not JSON") from error
    if not isinstance(message, dict):
        raise ConnectionError("the message is no object")
    return message


def receive_into(
    channel: socket.socket, buffer: memoryview, *, deadline: float | None = None
) -> None:
    """Wait until ``buffer`` is full. Raise ConnectionError if the other side ends before."""
    received = 0
    while received < len(buffer):
        if deadline is not None:
            channel.settimeout(max(deadline - time.monotonic(), _MIN_WAIT_S))
        num_bytes = channel.recv_into(buffer[received:])
        if num_bytes == 0:
            raise ConnectionError("the other side has ended")
        received += num_bytes


class WorkerCall:
    """A request to a server for which its workers connect to this process.

    Attributes:
        channels: a connection to each worker.
    """

    def __init__(
        self, server: Server, path: str, *, field: str, num_workers: int, silence_s: float
    ) -> None:
        """Send the request, and wait until the workers have connected.

        Args:
            field: the name in the request under which the workers find whom to connect to.
            silence_s: the longest wait for a worker or for the answer.

        Raises:
            ServerLost: the server ended, or its workers do not connect.
            EngineFailure: it refuses the request.
        """
        self.channels: list[socket.socket] = []
        self._silence_s = silence_s
        local, token = _local_address(server), secrets.token_hex(16)
        family = socket.AF_INET6 if ":" in local else socket.AF_INET
        with socket.create_server((local, 0), family=family, backlog=num_workers) as listener:
            address, port = listener.getsockname()[:2]
            whom = {"address": address, "port": port, "token": token}
            self._exchange: Exchange | None = server.ask(path, {field: whom}, timeout_s=silence_s)
            try:
                self._accept_all(listener, self._exchange, token=token, num_workers=num_workers)
            except BaseException:
                self.close()
                raise

    def finish(self) -> None:
        """Wait for the answer, and end the connections."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.result()
        self.close()

    def close(self) -> None:
        """End the connections; idempotent."""
        for channel in self.channels:
            channel.close()
        self.channels = []
        if self._exchange is not None:
            self._exchange.close()
            self._exchange = None

    def _accept_all(
        self, listener: socket.socket, exchange: Exchange, *, token: str, num_workers: int
    ) -> None:
        place = f"{listener.getsockname()[0]}:{listener.getsockname()[1]}"
        deadline = time.monotonic() + CONNECT_S
        with DefaultSelector() as selector:
            selector.register(listener, EVENT_READ)
            selector.register(exchange, EVENT_READ)
            while len(self.channels) < num_workers:
                ready = [key.fileobj for key, _ in selector.select(deadline - time.monotonic())]
                if not ready:
                    raise ServerLost(f"its workers did not connect to {place} of this machine")
                if listener in ready:
                    self._accept(listener, token, deadline=deadline)
                elif exchange in ready:
                    self._exchange = None
                    exchange.result()  # it raises what the server answered
                    raise ServerLost("it answered before its workers had connected")

    def _accept(self, listener: socket.socket, token: str, *, deadline: float) -> None:
        """Accept a connection, and keep it if it proves to be a worker of the server."""
        channel, _ = listener.accept()
        limit = min(deadline, time.monotonic() + _PROOF_S)
        with suppress(OSError, ValueError, TypeError, RecursionError):  # of strangers
            said = receive_message(channel, max_bytes=_MAX_PROOF_BYTES, deadline=limit)
            if compare_digest(str(said.get("token")).encode(), token.encode()):
                channel.settimeout(self._silence_s)
                self.channels.append(channel)
                return
        channel.close()


def _local_address(server: Server) -> str:
    """Return the address of this machine from which a server is reached."""
    exchange = server.ask("/health", method="GET")
    address = exchange.local_address
    exchange.result()
    return address
