# SPDX-License-Identifier: Apache-2.0
"""The program of a reward process: it reads requests from a socket and writes outcomes to it.

Input is length-prefixed pickles: a ``WorkerSetup``, then lists of ``RewardRequest``s. Output is
JSON lines: a greeting, then the outcomes of each list after its secret number. The program never
imports torch. Prints of a reward function go to the log of the setup, else to stderr. The
process always ends with its parent: the parent holds the other end of a pipe, and the kernel
signals this process group when that end closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
import os
import pickle
import resource
import socket
import sys
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.errors import NO_VALUE, UserError
from tandem.rewards.scoring import (
    RewardSpec,
    Scorer,
    load_scorer,
    score_requests,
    score_requests_concurrently,
)
from tandem.types import RewardOutcome, RewardStatus

LENGTH_BYTES = 4
NUMBER_BYTES = 16
"""The length of the secret number before each list of requests."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message: the reward to load, and its limits.

    Attributes:
        log: the file for prints and for the first traceback; None for stderr without traceback.
    """

    spec: RewardSpec
    deadline_s: float
    memory_limit_bytes: int | None
    log: str | None = None


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Serve requests until the other end of the channel closes."""
    for descriptor in (channel_fd, lifeline_fd):
        os.set_inheritable(descriptor, False)
    _end_with_parent(lifeline_fd)
    os.dup2(2, 1)  # prints of a reward function go to stderr, not into a command's output
    # A process that is killed loses what it has not written.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
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
    if setup.log is not None:
        _write_to(setup.log)
    try:
        scorer = load_scorer(setup.spec, on_error=_ErrorLog(is_open=setup.log is not None))
    except UserError as error:
        value = None if error.value is NO_VALUE else [error.value]
        channel.sendall(_line({"error": [error.key, value, error.rule, error.remedy]}))
        return
    facts = {"is_concurrent": scorer.is_concurrent, "takes_groups": scorer.takes_groups}
    channel.sendall(_line(facts))
    if scorer.is_concurrent:
        asyncio.run(_serve_concurrently(channel, scorer, deadline_s=setup.deadline_s))
    else:
        _serve(channel, scorer)


class _ErrorLog:
    """A log of the traceback of the first error, if it is open."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open

    def __call__(self, error: BaseException) -> None:
        if self._is_open:
            self._is_open = False
            text = "".join(traceback.format_exception(error))
            os.write(2, f"The first error of reward process {os.getpid()}:\n{text}".encode())


def _write_to(log: str) -> None:
    """Append what this process and its children print to ``log``."""
    try:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return  # they go to stderr
    for standard in (1, 2):
        os.dup2(descriptor, standard)
    os.close(descriptor)


def _end_with_parent(lifeline_fd: int) -> None:
    """Make the kernel send SIGIO, which kills, to this process group when the pipe closes."""
    # A thread waiting on the pipe would need the GIL, which a hanging C call may hold.
    fcntl.fcntl(lifeline_fd, fcntl.F_SETOWN, -os.getpgrp())
    flags = fcntl.fcntl(lifeline_fd, fcntl.F_GETFL)
    fcntl.fcntl(lifeline_fd, fcntl.F_SETFL, flags | os.O_ASYNC)


def _serve(channel: socket.socket, scorer: Scorer) -> None:
    for message in _messages(channel):
        outcomes = score_requests(scorer, pickle.loads(message[NUMBER_BYTES:]))
        channel.sendall(_outcome_line(message[:NUMBER_BYTES], outcomes))


def _messages(channel: socket.socket) -> Iterator[bytes]:
    stream = channel.makefile("rb")
    while header := stream.read(LENGTH_BYTES):
        yield stream.read(int.from_bytes(header, "big"))


async def _serve_concurrently(channel: socket.socket, scorer: Scorer, *, deadline_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)

    async def answer(message: bytes) -> None:
        requests = pickle.loads(message[NUMBER_BYTES:])
        outcomes = await score_requests_concurrently(scorer, requests, deadline_s=deadline_s)
        writer.write(_outcome_line(message[:NUMBER_BYTES], outcomes))

    async with asyncio.TaskGroup() as tasks:
        while header := await reader.read(LENGTH_BYTES):
            header += await reader.readexactly(LENGTH_BYTES - len(header))
            message = await reader.readexactly(int.from_bytes(header, "big"))
            tasks.create_task(answer(message))


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


def _outcome_line(number: bytes, outcomes: Sequence[RewardOutcome]) -> bytes:
    return _line([number.hex(), [_fields(outcome) for outcome in outcomes]])


def _fields(outcome: RewardOutcome) -> list[Any]:
    score = outcome.score if outcome.status is RewardStatus.VALUE else None
    return [
        outcome.status.value,
        score,
        dict(outcome.extra),
        outcome.detail,
        outcome.prediction,
        dict(outcome.texts),
    ]


def _line(message: Any) -> bytes:
    return json.dumps(message, default=str).encode() + b"\n"
