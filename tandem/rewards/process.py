# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a reward process: requests go in, outcomes or a failure come back.

It is a small state machine on the event loop: starting, serving, dead. ``pool`` decides which
request caused a failure. An answer carries the secret number of its job; any other message on the
channel ends the process.
"""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.children.process import ChildProcess
from tandem.errors import RunFailure, UserError
from tandem.rewards.scoring import failure, timeout
from tandem.rewards.worker import NUMBER_BYTES, WorkerSetup
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

_PROGRAM = "tandem.rewards.worker"
_START_DEADLINE_S = 60.0
_CONCURRENT_GRACE_S = 0.5


class Batch:
    """The requests of one call. The future ``outcomes`` is done once all outcomes have arrived."""

    def __init__(self, size: int) -> None:
        self.outcomes: asyncio.Future[list[RewardOutcome]] = (
            asyncio.get_running_loop().create_future()
        )
        self._collected: dict[int, RewardOutcome] = {}
        self._size = size

    def put(self, index: int, outcome: RewardOutcome) -> None:
        """Store the outcome of request ``index``, even if the caller no longer waits."""
        self._collected[index] = outcome
        if len(self._collected) == self._size and not self.outcomes.done():
            self.outcomes.set_result([self._collected[i] for i in range(self._size)])

    def fail(self, error: Exception) -> None:
        """Raise ``error`` in the caller, unless its outcomes are complete."""
        if not self.outcomes.done():
            self.outcomes.set_exception(error)


@dataclass(slots=True, eq=False)
class Job:
    """Pickled requests of a batch that are scored together.

    Attributes:
        start, size: the range of the requests in the batch.
        is_suspect: whether its process was lost while it computed the job, for which another job
            or a signal from outside may be the cause, or failed while it computed several at a
            time. The job is run once more, alone, in a process that has run no other.
    """

    batch: Batch
    start: int
    size: int
    payload: bytes
    is_suspect: bool = False

    def finish(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Pass the outcomes to the batch."""
        for index, outcome in enumerate(outcomes, self.start):
            self.batch.put(index, outcome)


def make_jobs(batch: Batch, requests: Sequence[RewardRequest], *, size: int) -> list[Job]:
    """Pickle ``size`` requests for each job, so that an error of pickling raises in the caller."""
    starts = range(0, len(requests), size)
    parts = [list(requests[start : start + size]) for start in starts]
    return [
        Job(batch, start, len(part), pickle.dumps(part))
        for start, part in zip(starts, parts, strict=True)
    ]


class ProcessOwner(Protocol):
    """The listener to the events of a process."""

    def on_ready(self, process: RewardProcess) -> None:
        """Handle that the function is loaded."""
        ...

    def on_idle(self, process: RewardProcess) -> None:
        """Handle that every request is answered."""
        ...

    def on_start_failed(self, process: RewardProcess, error: Exception, *, is_lost: bool) -> None:
        """Handle that the function could not be loaded; the process is dead.

        Args:
            is_lost: whether the process died or was stopped, which may have come from outside.
        """
        ...

    def on_failed(self, process: RewardProcess, outcome: RewardOutcome, *, is_lost: bool) -> None:
        """Handle that the process hung or died; ``outcome`` is for the request that caused it.

        Args:
            is_lost: whether the process died or was stopped, or something wrote to its channel.
                That may have come from outside, or from an earlier request.
        """
        ...


class RewardProcess:
    """A child process with its event-loop callbacks. ``submit`` need not wait until it is ready.

    Attributes:
        is_fresh: whether it has never had a job.
        is_concurrent: whether it computes several jobs at a time.
        takes_groups: whether the requests of one call are one job.
    """

    def __init__(
        self, setup: WorkerSetup, owner: ProcessOwner, *, environment: Mapping[str, str]
    ) -> None:
        self.in_flight: dict[str, Job] = {}
        self.is_ready = False
        self.is_fresh = True
        self.is_concurrent = self.takes_groups = False
        self._deadline_s = setup.deadline_s
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._silent_since_s = self._loop.time()
        self._child = ChildProcess(_PROGRAM, self, environment=environment)
        self._child.send([pickle.dumps(setup)])
        self._watch()

    @property
    def is_open(self) -> bool:
        """Whether it takes jobs while others are in flight."""
        return self.is_concurrent and not any(job.is_suspect for job in self.in_flight.values())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Send jobs to the process; outcomes arrive in order unless ``is_concurrent``."""
        self.is_fresh = False
        if not self.in_flight:
            self._silent_since_s = self._loop.time()
        messages = []
        for job in jobs:
            number = secrets.token_bytes(NUMBER_BYTES)
            self.in_flight[number.hex()] = job
            messages.append(number + job.payload)
        self._child.send(messages)
        self._watch()

    def kill(self) -> None:
        """Kill the process and all its children without waiting; idempotent."""
        self._child.kill()
        if self._timer is not None:
            self._timer.cancel()

    def reap(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for the killed process; return whether it is gone."""
        return self._child.reap(wait_s)

    def on_lines(self, lines: list[bytes]) -> None:
        """See ``ChildListener``."""
        for line in lines:
            if not self._child.is_killed:
                self._take(line)
        if not self._child.is_killed and not self.in_flight:
            self._owner.on_idle(self)

    def on_exit(self) -> None:
        """See ``ChildListener``."""
        self._end(failure(RewardStatus.ERROR, self._child.describe_end()), is_lost=True)

    def _take(self, line: bytes) -> None:
        try:
            if self.is_ready:
                self._take_answer(json.loads(line))
            else:
                self._take_greeting(json.loads(line))
        except (
            ValueError,
            TypeError,
            LookupError,
            ArithmeticError,
            AttributeError,
            RecursionError,
        ):
            text = "something wrote to the channel of its reward process"
            self._end(failure(RewardStatus.ERROR, text), is_lost=True)
            return
        self._silent_since_s = self._loop.time()

    def _take_answer(self, message: Any) -> None:
        number, fields = message
        job = self.in_flight[number]
        outcomes = [_outcome(each) for each in fields]
        if len(outcomes) != job.size:
            raise ValueError("an answer has one outcome for each request")
        del self.in_flight[number]
        job.finish(outcomes)

    def _take_greeting(self, message: Any) -> None:
        if "error" in message:
            key, value, rule, remedy = message["error"]
            error = UserError(key, *value or (), rule=rule, remedy=remedy)
            self.kill()
            self._owner.on_start_failed(self, error, is_lost=False)
            return
        self.is_concurrent = bool(message["is_concurrent"])
        self.takes_groups = bool(message["takes_groups"])
        self.is_ready = True
        self._watch()
        self._owner.on_ready(self)

    def _limit_s(self) -> float:
        if not self.is_ready:
            return _START_DEADLINE_S
        return self._deadline_s + (_CONCURRENT_GRACE_S if self.is_concurrent else 0.0)

    def _watch(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._limit_s(), self._check_silence)

    def _check_silence(self) -> None:
        self._timer = None
        if self.is_ready and not self.in_flight:
            return
        left_s = self._silent_since_s + self._limit_s() - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._check_silence)
        else:
            limit_s = self._deadline_s if self.is_ready else _START_DEADLINE_S
            self._end(timeout(limit_s), is_lost=self._child.is_stopped())

    def _end(self, outcome: RewardOutcome, *, is_lost: bool = False) -> None:
        self.kill()
        if self.is_ready:
            self._owner.on_failed(self, outcome, is_lost=is_lost)
        else:
            text = f"a reward process did not start: {outcome.detail}"
            self._owner.on_start_failed(self, RunFailure(text), is_lost=is_lost)


def _outcome(fields: Sequence[Any]) -> RewardOutcome:
    """Return the outcome that a child has written.

    Raises:
        ValueError, TypeError, AttributeError: the fields are not those of an outcome.
    """
    status, score, extra, detail, prediction, texts = fields
    is_number = isinstance(score, int | float) and math.isfinite(score)
    if is_number is not (RewardStatus(status) is RewardStatus.VALUE):
        raise ValueError("a value has a score, and a failure has none")
    numbers = {str(name): float(value) for name, value in extra.items()}
    if not all(isinstance(text, str) for text in (detail, prediction or "", *texts.values())):
        raise TypeError("an outcome's details are text")
    score = score if is_number else math.nan
    return RewardOutcome(RewardStatus(status), score, numbers, detail, prediction, texts)
