# SPDX-License-Identifier: Apache-2.0
"""The pool of child processes that compute rewards. A failure is a typed outcome, never a 0.

A process that hangs or dies is killed and replaced. The sample that it was computing becomes
TIMEOUT or ERROR; its other samples are run again. If the process died or was stopped, or something
wrote to its channel, another one may be the cause, and the sample is first run once more, in a
process that has run no other. No process outlives ``close`` or this process. Requests and outcomes
are streamed: 256 GSM8K rewards take 6 ms on two cores (pebble, with a deadline for each sample: 20
to 34 ms). The pool is not a sandbox: a reward function has all rights of its user.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tandem.children.environment import ChildEnvironment
from tandem.errors import UserError
from tandem.rewards.custom import Signature
from tandem.rewards.process import Batch, Job, RewardProcess, make_jobs
from tandem.rewards.scoring import RewardSpec
from tandem.rewards.worker import WorkerSetup
from tandem.types import RewardOutcome, RewardRequest, RewardStatus

logger = logging.getLogger(__name__)

_MAX_WINDOW = 32
_REAP_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class RewardLimits:
    """The limits of a pool.

    Attributes:
        num_processes: the maximum number of processes.
        deadline_s: the time limit of a sample.
        memory_limit_bytes: the memory limit of a process; None without a limit.
        log: the file for the prints and the first traceback of each process; None for stderr.
        environment: the environment variables of a process; none without it.

    Raises:
        UserError: a limit is not positive.
    """

    num_processes: int
    deadline_s: float
    memory_limit_bytes: int | None = None
    log: str | None = None
    environment: ChildEnvironment = field(default_factory=ChildEnvironment)

    def __post_init__(self) -> None:
        if self.num_processes < 1:
            raise UserError(
                "reward.num_workers", self.num_processes, rule="must be at least 1", remedy="Set 1."
            )
        if self.deadline_s <= 0:
            raise UserError(
                "reward.timeout_s", self.deadline_s, rule="must be positive", remedy="Set 30."
            )


class RewardPool:
    """A pool that scores the requests of any number of concurrent callers on one event loop.

    Processes start when there is work for them. Each receives a window of requests at a time, so
    that cheap rewards share the cost of a round trip; windows shrink as work runs out.
    Functions that score batches get the requests of one call together. Coroutine functions get
    requests while others are under way.

    Example:
        >>> async with RewardPool(RewardSpec(), RewardLimits(4, deadline_s=10)) as pool:
        ...     outcomes = await pool.score(requests)
    """

    def __init__(self, spec: RewardSpec, limits: RewardLimits) -> None:
        self._limits = limits
        self._setup = WorkerSetup(
            spec,
            limits.deadline_s,
            limits.memory_limit_bytes,
            log=limits.log,
            withheld=limits.environment.withheld,
        )
        self._takes_groups: bool | None = None
        self._pending: deque[Job] = deque()
        self._processes: list[RewardProcess] = []
        self._dying: list[RewardProcess] = []
        self._batches: set[Batch] = set()
        self._starts: set[asyncio.Future[None]] = set()
        self._error: Exception | None = None
        self._was_start_lost = False
        self._has_warned = False

    async def __aenter__(self) -> RewardPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> None:
        """Start one process and wait until it has loaded the reward function.

        Raises:
            UserError: the function cannot be loaded.
            RunFailure: the process ends before that, and so does a second one.
        """
        self._check_usable()
        if any(process.is_ready for process in self._processes):
            return
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if not self._processes:
            self._start_process()
        self._starts.add(started)
        await started

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Return the outcome of each request, in their order.

        Raises:
            UserError: the reward function cannot be loaded.
            RunFailure: two processes end before they have loaded the function.
            RuntimeError: no process can be started, or the pool is closed.
        """
        self._check_usable()
        if not requests:
            return []
        size = len(requests) if await self.takes_groups() else 1
        batch = Batch(len(requests))
        self._pending.extend(make_jobs(batch, requests, size=size))
        self._batches.add(batch)
        try:
            self._dispatch()
            return await batch.outcomes
        finally:
            self._batches.discard(batch)
            if batch.outcomes.cancelled() or not batch.outcomes.done():
                self._pending = deque(job for job in self._pending if job.batch is not batch)

    async def takes_groups(self) -> bool:
        """Return whether the requests of one call are scored together."""
        if self._takes_groups is None:
            await self.start()
        assert self._takes_groups is not None, "a started process has said so"
        return self._takes_groups

    async def close(self) -> None:
        """Kill all processes and wait until they are gone. Pending calls fail; idempotent."""
        self._fail(RuntimeError("the reward pool is closed"))
        dying, self._dying = self._dying, []
        for process in dying:
            await asyncio.to_thread(process.reap, _REAP_WAIT_S)

    def on_ready(self, process: RewardProcess) -> None:
        """See ``ProcessOwner``."""
        for started in self._starts:
            if not started.done():
                started.set_result(None)
        self._starts.clear()
        self._takes_groups = process.takes_groups
        self._was_start_lost = False
        self._resume()

    def on_idle(self, process: RewardProcess) -> None:
        """See ``ProcessOwner``."""
        self._resume()

    def on_start_failed(self, process: RewardProcess, error: Exception, *, is_lost: bool) -> None:
        """Fail the pool: no other process could load the function either.

        A lost process is replaced first, unless the start before it was lost too.
        """
        if not is_lost or self._was_start_lost:
            self._fail(error)
            return
        self._was_start_lost = True
        self._remove(process)
        self._pending.extendleft(reversed(process.in_flight.values()))
        try:
            self._start_process()
        except OSError as refusal:
            self._fail(RuntimeError(f"no reward process can be started: {refusal}"))
        self._resume()

    def on_failed(self, process: RewardProcess, outcome: RewardOutcome, *, is_lost: bool) -> None:
        """Give ``outcome`` to the first open request, or suspect all if they ran concurrently.

        A request whose process is lost becomes a suspect first.
        """
        self._remove(process)
        jobs = list(process.in_flight.values())
        runs = len(jobs) if process.is_concurrent else 1
        if runs == 1 and jobs and (jobs[0].is_suspect or not is_lost):
            job = jobs.pop(0)
            job.finish([outcome] * job.size)
            runs = 0
        for job in jobs[:runs]:
            job.is_suspect = True
        if jobs[:runs] and not self._has_warned:
            self._has_warned = True
            calls = "call is" if len(jobs[:runs]) == 1 else "calls are"
            told = "a reward process ended (%s); its %s made once more"
            logger.warning(told, outcome.detail, calls)
        self._pending.extendleft(reversed(jobs))
        self._resume()

    def _remove(self, process: RewardProcess) -> None:
        """Forget a process that has been killed."""
        self._processes.remove(process)
        self._dying = [dead for dead in self._dying if not dead.reap(0)] + [process]

    def _resume(self) -> None:
        try:
            self._dispatch()
        except OSError as error:  # no caller awaits this callback
            self._fail(RuntimeError(f"no reward process can be started: {error}"))

    def _dispatch(self) -> None:
        while self._pending and (process := self._next_process()) is not None:
            process.submit(self._take_window(is_concurrent=process.is_concurrent))

    def _next_process(self) -> RewardProcess | None:
        """Return the process for the next jobs; None if all are busy."""
        if self._pending[0].is_suspect:
            return self._fresh_process()
        idle = next((process for process in self._processes if not process.in_flight), None)
        if idle is not None:
            return idle
        if len(self._processes) < self._limits.num_processes:
            return self._start_process()
        free = (process for process in self._processes if process.is_open)
        return min(free, key=lambda process: len(process.in_flight), default=None)

    def _fresh_process(self) -> RewardProcess | None:
        """Return a process that has had no job, in place of an idle one; None if all are busy.

        What an earlier job left behind, such as a thread or a child that writes to the channel,
        could end any other process too.
        """
        idle = [process for process in self._processes if not process.in_flight]
        fresh = next((process for process in idle if process.is_fresh), None)
        if fresh is not None:
            return fresh
        if len(self._processes) >= self._limits.num_processes:
            if not idle:
                return None
            idle[0].kill()
            self._remove(idle[0])
        return self._start_process()

    def _start_process(self) -> RewardProcess:
        variables = self._limits.environment.variables
        process = RewardProcess(self._setup, self, environment=variables)
        self._processes.append(process)
        return process

    def _take_window(self, *, is_concurrent: bool) -> list[Job]:
        """Remove and return the next jobs for one process; a suspect runs alone."""
        share = -(-len(self._pending) // self._limits.num_processes)
        size = share if is_concurrent else min(-(-share // 2), _MAX_WINDOW)
        window = [self._pending.popleft()]
        while len(window) < size and not (window[0].is_suspect or self._pending[0].is_suspect):
            window.append(self._pending.popleft())
        return window

    def _check_usable(self) -> None:
        if self._error is not None:
            raise self._error

    def _fail(self, error: Exception) -> None:
        """Close the pool and raise ``error`` in every pending call."""
        self._error = self._error or error
        for process in self._processes:
            process.kill()
        self._dying += self._processes
        self._processes, self._pending = [], deque()
        for started in self._starts:
            if not started.done():
                started.set_exception(self._error)
        self._starts.clear()
        for batch in self._batches:
            batch.fail(self._error)


async def check_reward(
    spec: RewardSpec, limits: RewardLimits, *, trials: Sequence[RewardRequest] = ()
) -> RewardOutcome | None:
    """Load the reward in a child process and try it, then end the process.

    Return the outcome of the trial that succeeded, None without trials.

    Args:
        trials: requests that are tried one after another until one succeeds.

    Raises:
        UserError: a function cannot be loaded, or every trial failed.
    """
    async with RewardPool(spec, limits) as pool:
        await pool.start()
        outcome: RewardOutcome | None = None
        for trial in trials:
            (outcome,) = await pool.score([trial])
            if outcome.status is RewardStatus.VALUE:
                return outcome
        if outcome is not None:
            raise _refused(spec, outcome)
    return None


def _refused(spec: RewardSpec, outcome: RewardOutcome) -> UserError:
    expected = ", ".join(Signature.SAMPLE.value)
    remedy = (
        f"A function of ({expected}) must return a finite number, or a mapping with 'score'; "
        "docs/rewards.md has the other signatures."
    )
    if outcome.status is RewardStatus.TIMEOUT:
        remedy = "Make the function faster, or raise reward.timeout_s."
    return UserError(
        "custom_reward_function.path",
        [function.path for function in spec.functions],
        rule=f"has no value for the first row of the data: {outcome.detail}",
        remedy=remedy,
    )
