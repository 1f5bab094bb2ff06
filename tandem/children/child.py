# SPDX-License-Identifier: Apache-2.0
"""The child's side of a limited process: its channel, its end with the parent, and its limits.

Programs of child processes use it and never import torch. Their output goes to a log, else to
stderr. A process always ends with its parent: the parent holds the other end of a pipe, and the
kernel signals this process group when that end closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import resource
import select
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import Any

LENGTH_BYTES = 4


def open_channel(channel_fd: int, lifeline_fd: int) -> socket.socket:
    """Tie this process to its parent and return the channel; prints go to stderr from now on."""
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    _end_with_parent(lifeline_fd)
    os.dup2(2, 1)  # prints of a user's function go to stderr, not into a command's output
    # A process that is killed loses what it has not written.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    return socket.socket(fileno=channel_fd)


def set_limits(*, memory_limit_bytes: int | None) -> None:
    """Limit the memory of this process, and write no core files."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_limit_bytes is not None:
        # Not RLIMIT_AS: libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, (memory_limit_bytes, memory_limit_bytes))


def write_prints_to(log: str) -> None:
    """Append the output of this process and its children to ``log``."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return  # they go to stderr
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def receive_first(channel: socket.socket) -> bytes:
    """Read one message and not a byte more: a buffered stream reads the following ones.

    Raises:
        ConnectionError: the parent has closed the channel.
    """
    length = int.from_bytes(channel.recv(LENGTH_BYTES, socket.MSG_WAITALL), "big")
    message = channel.recv(length, socket.MSG_WAITALL)
    if not message:
        raise ConnectionResetError("the channel was closed before the first message")
    return message


def receive_all(channel: socket.socket) -> Iterator[bytes]:
    """Yield messages until the parent closes the channel."""
    stream = channel.makefile("rb")
    while header := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(header, "big"))


async def receive_concurrently(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield messages of an event loop until the parent closes the channel."""
    while header := await reader.read(LENGTH_BYTES):
        header += await reader.readexactly(LENGTH_BYTES - len(header))
        yield await reader.readexactly(int.from_bytes(header, "big"))


def encode_line(message: Any) -> bytes:
    """Encode an answer as a line of JSON; values of other types become text."""
    return json.dumps(message, default=str).encode() + b"\n"


def _end_with_parent(lifeline_fd: int) -> None:
    """Make the kernel send SIGIO, which kills, to this process group when the pipe closes."""
    # A thread waiting on the pipe would need the GIL, which a hanging C call may hold.
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([lifeline_fd], [], [], 0)[0]:
        os._exit(1)  # it had closed before
