# SPDX-License-Identifier: Apache-2.0
"""The parent's side of a reward process: requests go in, outcomes or a failure come back.

It is a small state machine on the event loop: starting, serving, dead. ``pool`` decides which
request caused a failure. Each process is a fresh interpreter (about 60 ms): it neither forks a
process that holds a device nor imports the main program again. An answer carries the secret number
of its job; any other message on the channel ends the process.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.errors import UserError
from tandem.rewards.scoring import failure, timeout
from tandem.rewards.worker import LENGTH_BYTES, NUMBER_BYTES, WorkerSetup
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

# One thread: several processes run, and each thread of a math library allocates tens of MiB.
_BOOTSTRAP = (
    "import json, os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.environ.setdefault('OMP_NUM_THREADS', '1'); "
    "sys.path[:] = json.loads(sys.argv[1]); "
    "from tandem.rewards.worker import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_READ_BYTES = 1 << 16
_START_DEADLINE_S = 60.0
_CONCURRENT_GRACE_S = 0.5
_EXIT_WAIT_S = 1.0


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
        is_suspect: whether a process died while it computed the job, or failed while it computed
            several at a time, so that any of them may be the cause. The job is run again on its
            own, once.
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

    def on_start_failed(self, process: RewardProcess, error: Exception) -> None:
        """Handle that the function could not be loaded; the process is dead."""
        ...

    def on_failed(self, process: RewardProcess, outcome: RewardOutcome, *, is_lost: bool) -> None:
        """Handle that the process hung or died; ``outcome`` is for the request that caused it.

        Args:
            is_lost: whether the process died or was stopped, which may have come from outside.
        """
        ...


class RewardProcess:
    """A child process with its event-loop callbacks. ``submit`` need not wait until it is ready.

    Attributes:
        is_concurrent: whether it computes several jobs at a time.
        takes_groups: whether the requests of one call are one job.
    """

    def __init__(self, setup: WorkerSetup, owner: ProcessOwner) -> None:
        self.in_flight: dict[str, Job] = {}
        self.is_ready = False
        self.is_concurrent = self.takes_groups = False
        self._deadline_s = setup.deadline_s
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self._incoming, self._outgoing = b"", bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._silent_since_s = self._loop.time()
        self._lifeline_fd: int | None
        self._socket, self._lifeline_fd, self._process = _start_interpreter()
        self._loop.add_reader(self._socket, self._receive)
        self._add(pickle.dumps(setup))
        self._flush()
        self._watch()

    @property
    def is_open(self) -> bool:
        """Whether it takes jobs while others are in flight."""
        return self.is_concurrent and not any(job.is_suspect for job in self.in_flight.values())

    def submit(self, jobs: Sequence[Job]) -> None:
        """Send jobs to the process; outcomes arrive in order unless ``is_concurrent``."""
        if not self.in_flight:
            self._silent_since_s = self._loop.time()
        for job in jobs:
            number = secrets.token_bytes(NUMBER_BYTES)
            self.in_flight[number.hex()] = job
            self._add(number + job.payload)
        self._flush()
        self._watch()

    def kill(self) -> None:
        """Kill the process and all its children without waiting; idempotent."""
        if self._lifeline_fd is None:
            return
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        if self._timer is not None:
            self._timer.cancel()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._socket.close()
        os.close(self._lifeline_fd)
        self._lifeline_fd = None

    def reap(self, wait_s: float) -> bool:
        """Wait up to ``wait_s`` for the killed process; return whether it is gone."""
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _add(self, message: bytes) -> None:
        self._outgoing += len(message).to_bytes(LENGTH_BYTES, "big") + message

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(self._socket, self._flush)
            return
        except ConnectionError:
            self._outgoing.clear()  # the process died; _receive will handle that
        self._loop.remove_writer(self._socket)

    def _receive(self) -> None:
        try:
            received = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._end(self._died(), is_lost=True)
            return
        *lines, self._incoming = (self._incoming + received).split(b"\n")
        for line in lines:
            if self._lifeline_fd is not None:
                self._take(line)
        if lines and self._lifeline_fd is not None and not self.in_flight:
            self._owner.on_idle(self)

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
            self._end(failure(RewardStatus.ERROR, text))
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
            self._owner.on_start_failed(self, error)
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
            self._end(timeout(self._deadline_s), is_lost=self._is_stopped())

    def _is_stopped(self) -> bool:
        """Return whether a signal such as SIGSTOP has stopped the process."""
        look = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, look) is not None

    def _end(self, outcome: RewardOutcome, *, is_lost: bool = False) -> None:
        self.kill()
        if self.is_ready:
            self._owner.on_failed(self, outcome, is_lost=is_lost)
        else:
            text = f"a reward process did not start: {outcome.detail}"
            self._owner.on_start_failed(self, RuntimeError(text))

    def _died(self) -> RewardOutcome:
        self.kill()
        self.reap(_EXIT_WAIT_S)
        code = self._process.returncode
        if code is not None and code < 0:
            return failure(RewardStatus.ERROR, f"process killed by {signal.Signals(-code).name}")
        return failure(RewardStatus.ERROR, f"process ended with exit code {code}")


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


def _start_interpreter() -> tuple[socket.socket, int, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair()
    their_lifeline_fd, lifeline_fd = os.pipe()
    descriptors = (theirs.fileno(), their_lifeline_fd)
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _BOOTSTRAP, json.dumps(sys.path), *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            start_new_session=True,
        )
    finally:
        theirs.close()
        os.close(their_lifeline_fd)
    ours.setblocking(False)
    return ours, lifeline_fd, process
