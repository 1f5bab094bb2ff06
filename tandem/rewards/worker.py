# SPDX-License-Identifier: Apache-2.0
"""The program of a reward process: it reads requests from a socket and writes outcomes to it.

Input is length-prefixed pickles: a ``WorkerSetup``, then ``RewardRequest``s. Output is JSON lines:
a greeting, then the number of each request with the fields of its outcome. The program never
imports torch. It always ends with its parent: the parent holds the other end of a pipe, and the
kernel signals this process group when that end closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import pickle
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tandem.errors import UserError
from tandem.rewards.scoring import (
    RewardSpec,
    Scorer,
    load_scorer,
    score_request,
    score_request_concurrently,
)
from tandem.types import RewardOutcome, RewardStatus

LENGTH_BYTES = 4


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message: the reward to load, and its limits."""

    spec: RewardSpec
    deadline_s: float
    memory_limit_bytes: int | None


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Serve requests until the other end of the channel closes."""
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    _end_with_parent(lifeline_fd)
    os.dup2(2, 1)  # prints of a reward function go to stderr, not into a command's output
    try:
        _work(socket.socket(fileno=channel_fd))
    except ConnectionError:
        return  # the parent is gone


def _work(channel: socket.socket) -> None:
    setup: WorkerSetup = pickle.loads(_receive_message(channel))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if setup.memory_limit_bytes is not None:
        limit = (setup.memory_limit_bytes, setup.memory_limit_bytes)
        # Not RLIMIT_AS: libraries reserve far more address space than they use.
        resource.setrlimit(resource.RLIMIT_DATA, limit)
    try:
        scorer = load_scorer(setup.spec)
    except UserError as error:
        channel.sendall(_line({"error": str(error)}))
        return
    channel.sendall(_line({"is_concurrent": scorer.is_concurrent}))
    if scorer.is_concurrent:
        asyncio.run(_serve_concurrently(channel, scorer, deadline_s=setup.deadline_s))
    else:
        _serve(channel, scorer)


def _end_with_parent(lifeline_fd: int) -> None:
    """Make the kernel send SIGIO, which kills, to this process group when the pipe closes."""
    # A thread waiting on the pipe would need the GIL, which a hanging C call may hold.
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def _serve(channel: socket.socket, scorer: Scorer) -> None:
    for number, message in enumerate(_messages(channel)):
        outcome = score_request(scorer, pickle.loads(message))
        channel.sendall(_outcome_line(number, outcome))


def _messages(channel: socket.socket) -> Iterator[bytes]:
    stream = channel.makefile("rb")
    while header := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(header, "big"))


async def _serve_concurrently(channel: socket.socket, scorer: Scorer, *, deadline_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)

    async def answer(number: int, message: bytes) -> None:
        request = pickle.loads(message)
        outcome = await score_request_concurrently(scorer, request, deadline_s=deadline_s)
        writer.write(_outcome_line(number, outcome))

    number = 0
    async with asyncio.TaskGroup() as tasks:
        while header := await reader.read(LENGTH_BYTES):
            header += await reader.readexactly(LENGTH_BYTES - len(header))
            message = await reader.readexactly(int.from_bytes(header, "big"))
            tasks.create_task(answer(number, message))
            number += 1


def _receive_message(channel: socket.socket) -> bytes:
    """Read one message and not a byte more: a buffered stream reads the following ones.

    Raises:
        ConnectionError: the parent has closed the channel.
    """
    length = int.from_bytes(channel.recv(LENGTH_BYTES, socket.MSG_WAITALL), "big")
    message = channel.recv(length, socket.MSG_WAITALL)
    if not message:
        raise ConnectionResetError("the channel was closed before the first message")
    return message


def _outcome_line(number: int, outcome: RewardOutcome) -> bytes:
    score = outcome.score if outcome.status is RewardStatus.VALUE else None
    extra = dict(outcome.extra)
    return _line([number, outcome.status.value, score, extra, outcome.detail, outcome.prediction])


def _line(message: Any) -> bytes:
    return json.dumps(message).encode() + b"\n"
