# SPDX-License-Identifier: Apache-2.0
"""The program of a reward process: it reads requests from a socket and writes outcomes to it.

Input is length-prefixed pickles: a ``WorkerSetup``, then lists of ``RewardRequest``s. Output is
JSON lines: a greeting, then the outcomes of each list after its secret number. The program never
imports torch. Prints of a reward function go to the log of the setup, else to stderr.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tandem.children.child import (
    encode_line,
    open_channel,
    receive_all,
    receive_concurrently,
    receive_first,
    set_limits,
    write_prints_to,
)
from tandem.children.environment import hint_at_withheld
from tandem.errors import NO_VALUE, UserError
from tandem.rewards.scoring import (
    ENVIRONMENT_KEY,
    RewardSpec,
    Scorer,
    load_scorer,
    score_requests,
    score_requests_concurrently,
)
from tandem.types import RewardOutcome, RewardStatus

NUMBER_BYTES = 16
"""The length of the secret number before each list of requests."""


@dataclass(frozen=True, slots=True)
class WorkerSetup:
    """The first message: the reward to load, and its limits.

    Attributes:
        log: the file for prints and for the first traceback; None for stderr without traceback.
        withheld: the names of the variables of the run that this process does not have.
    """

    spec: RewardSpec
    deadline_s: float
    memory_limit_bytes: int | None
    log: str | None = None
    withheld: frozenset[str] = frozenset()


def main(channel_fd: int, lifeline_fd: int) -> None:
    """Serve requests until the other end of the channel closes."""
    try:
        _work(open_channel(channel_fd, lifeline_fd))
    except ConnectionError:
        return  # the parent is gone


def _work(channel: socket.socket) -> None:
    setup: WorkerSetup = pickle.loads(receive_first(channel))
    set_limits(memory_limit_bytes=setup.memory_limit_bytes)
    if setup.log is not None:
        write_prints_to(setup.log)
    try:
        log = _ErrorLog(is_open=setup.log is not None)
        scorer = load_scorer(setup.spec, on_error=log, withheld=setup.withheld)
    except UserError as error:
        value = None if error.value is NO_VALUE else [error.value]
        remedy = _hint(error, setup.withheld) or error.remedy
        channel.sendall(encode_line({"error": [error.key, value, error.rule, remedy]}))
        return
    facts = {"is_concurrent": scorer.is_concurrent, "takes_groups": scorer.takes_groups}
    channel.sendall(encode_line(facts))
    if scorer.is_concurrent:
        asyncio.run(_serve_concurrently(channel, scorer, deadline_s=setup.deadline_s))
    else:
        _serve(channel, scorer)


def _hint(error: UserError, withheld: frozenset[str]) -> str:
    """Return the sentence for a function that does not load without a withheld variable."""
    cause = error.__cause__
    hint = "" if cause is None else hint_at_withheld(cause, withheld, key=ENVIRONMENT_KEY)
    return f"{hint[0].upper()}{hint[1:]}." if hint else ""


class _ErrorLog:
    """A log of the traceback of the first error, if it is open."""

    def __init__(self, *, is_open: bool) -> None:
        self._is_open = is_open

    def __call__(self, error: BaseException) -> None:
        if self._is_open:
            self._is_open = False
            text = "".join(traceback.format_exception(error))
            os.write(2, f"The first error of reward process {os.getpid()}:\n{text}".encode())


def _serve(channel: socket.socket, scorer: Scorer) -> None:
    for message in receive_all(channel):
        outcomes = score_requests(scorer, pickle.loads(message[NUMBER_BYTES:]))
        channel.sendall(_outcome_line(message[:NUMBER_BYTES], outcomes))


async def _serve_concurrently(channel: socket.socket, scorer: Scorer, *, deadline_s: float) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)

    async def answer(message: bytes) -> None:
        requests = pickle.loads(message[NUMBER_BYTES:])
        outcomes = await score_requests_concurrently(scorer, requests, deadline_s=deadline_s)
        writer.write(_outcome_line(message[:NUMBER_BYTES], outcomes))

    async with asyncio.TaskGroup() as tasks:
        async for message in receive_concurrently(reader):
            tasks.create_task(answer(message))


def _outcome_line(number: bytes, outcomes: Sequence[RewardOutcome]) -> bytes:
    return encode_line([number.hex(), [_fields(outcome) for outcome in outcomes]])


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
