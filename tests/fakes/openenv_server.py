# SPDX-License-Identifier: Apache-2.0
"""A server of OpenEnv's wire protocol with a game: guess a number; the standard library alone.

``python openenv_server.py PLACES`` prints its port. Each session has a secret number, the seed of
its reset modulo 10. A right guess has the reward 1 and ends the episode, a wrong one 0.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import sys
from contextlib import suppress
from typing import Any

ACTION = {
    "type": "object",
    "properties": {"guess": {"type": "integer"}, "metadata": {"type": "object"}},
    "required": ["guess"],
}
SUFFIX = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
num_sessions = 0
most_sessions = 0


async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, places: int) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    path = head.split()[1]
    if path != "/ws":
        seen = {"/health": {"status": "healthy"}, "/schema": {"action": ACTION}}.get(path)
        seen = {"most": most_sessions} if path == "/most" else seen
        body = json.dumps(seen).encode()
        status = "200 OK" if seen is not None else "404 Not Found"
        writer.write(f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()
        return
    fields = dict(line.split(": ", 1) for line in head.splitlines()[1:] if ": " in line)
    lower = {name.lower(): value for name, value in fields.items()}
    key = base64.b64encode(hashlib.sha1(lower["sec-websocket-key"].encode() + SUFFIX).digest())
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: " + key + b"\r\n\r\n"
    )
    await play(reader, writer, places)


async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, places: int) -> None:
    global num_sessions, most_sessions  # noqa: PLW0603
    if num_sessions >= places:
        data = {"message": "full", "code": "CAPACITY_REACHED", "max_sessions": places}
        await send(writer, {"type": "error", "data": data})
        await end(reader, writer)
        return
    num_sessions += 1
    most_sessions = max(most_sessions, num_sessions)
    secret = 0
    try:
        while (message := await receive(reader, writer)) is not None:
            data = message.get("data", {})
            if message["type"] == "close":
                break
            if message["type"] == "reset":
                secret = data["seed"] % 10
                text = f"Guess a number below {data.get('below', 10)}."
                answer = observed({"text": text, "done": False}, None, data.get("over", False))
            else:
                answer = step(data, secret)
            await send(writer, answer)
    except asyncio.IncompleteReadError:
        pass
    finally:
        num_sessions -= 1
        await end(reader, writer)


async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Close as servers do: with a frame, and the connection when the client has answered."""
    with suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        writer.write(bytes([0x88, 0]))
        async with asyncio.timeout(5):
            while await receive(reader, writer) is not None:
                pass
    writer.close()


def step(action: dict[str, Any], secret: int) -> dict[str, Any]:
    guess = action.get("guess")
    if guess == 13:
        return {"type": "error", "data": {"message": "unlucky", "code": "EXECUTION_ERROR"}}
    if isinstance(guess, str) and guess.isdecimal():
        guess = int(guess)
    if not isinstance(guess, int):
        errors = [{"loc": ["guess"], "msg": "Input should be a valid integer"}]
        data = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": errors}
        return {"type": "error", "data": data}
    is_right = guess == secret
    return observed({"text": "right" if is_right else "wrong"}, float(is_right), is_right)


def observed(observation: dict[str, Any], reward: float | None, done: bool) -> dict[str, Any]:
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


async def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a message in two fragments, with a ping between them."""
    text = json.dumps(message).encode()
    first, rest = text[:50], text[50:]
    writer.write(bytes([0x01, len(first)]) + first)
    writer.write(bytes([0x89, 2]) + b"hi")
    size = bytes([len(rest)]) if len(rest) < 126 else bytes([126]) + len(rest).to_bytes(2, "big")
    writer.write(bytes([0x80]) + size + rest)
    await writer.drain()


async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Any:
    """Return the next message; None at the end. A pong must be what was sent."""
    while True:
        first, second = await reader.readexactly(2)
        assert second & 0x80, "a client masks its frames"
        size = second & 0x7F
        if size == 126:
            size = int.from_bytes(await reader.readexactly(2), "big")
        mask = await reader.readexactly(4)
        content = bytes(b ^ mask[i % 4] for i, b in enumerate(await reader.readexactly(size)))
        if first & 0x0F == 8:
            return None
        if first & 0x0F == 10:
            assert content == b"hi"
            continue
        return json.loads(content)


async def main() -> None:
    places = int(sys.argv[1])
    server = await asyncio.start_server(lambda r, w: serve(r, w, places), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
