# SPDX-License-Identifier: Apache-2.0
"""The pool of child processes that environments live in.

Episodes are spread evenly. An episode whose environment has state stays with its process; any other
one takes its next step wherever there is room. A process with a call that hangs gets no new steps
and is killed when nothing on it depends on it. A process that dies takes its stateful episodes
along: they have failed. A step of a stateless one is tried once more. Nothing here waits without
an end: each step has a deadline, after which its process is killed.
"""

from __future__ import annotations

import asyncio
import json
import pickle
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.agents.hosting import Play
from tandem.agents.setup import EnvironmentSetup, ServerFull, Task
from tandem.agents.worker import NUMBER_BYTES, End, Step
from tandem.children.process import ChildProcess
from tandem.data.call_formats import ToolSchema, message_of_turn, result_message
from tandem.errors import RunFailure, UserError
from tandem.types import AssistantTurn, Observation, ToolStatus

_PROGRAM = "tandem.agents.worker"
_START_DEADLINE_S = 60.0
_STEP_GRACE_S = 5.0
_END_WAIT_S = 5.0
_REAP_WAIT_S = 5.0
_FULL_WAIT_S = 1.0
"""The time between two questions to a server that is full with sessions of others."""


class EnvironmentLost(Exception):
    """The error of a step whose process died; its text says how."""


class _StartTooLong(EnvironmentLost):
    """The error of a process that was not ready in time, though nothing had stopped it."""


@dataclass(frozen=True, slots=True)
class _Answer:
    observation: Observation
    is_stateful: bool
    num_hung: int


class _Process:
    """An environment process: steps that wait for its start or are in flight, and the episodes
    whose state it holds.
    """

    def __init__(self, pool: EnvironmentPool) -> None:
        self._pool = pool
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[list[ToolSchema]] = loop.create_future()
        self.in_flight: dict[str, asyncio.Future[Any]] = {}
        self._abandoned: set[str] = set()
        self.episodes: set[tuple[int, int]] = set()
        self.num_waiting = 0
        self.is_retired = False
        self.child = ChildProcess(_PROGRAM, self, environment=pool.environment)
        self.child.send([pickle.dumps(pool.setup)])
        self._timer = loop.call_later(_START_DEADLINE_S, self._end_late_start)

    @property
    def load(self) -> int:
        """The number of episodes that depend on it, and of steps that will."""
        return self.num_waiting + len(self.in_flight) + len(self.episodes)

    async def wait_until_ready(self) -> None:
        """Wait until its tools are loaded; raise EnvironmentLost or UserError."""
        self.num_waiting += 1
        try:
            await asyncio.shield(self.ready)
        finally:
            self.num_waiting -= 1

    async def ask(self, request: Step | End | Play) -> Any:
        """Send a request and return the fields of its answer; raise EnvironmentLost."""
        if self.child.is_killed:
            raise EnvironmentLost("its process has ended")
        number = secrets.token_bytes(NUMBER_BYTES)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.in_flight[number.hex()] = answer
        self.child.send([number + pickle.dumps(request)])
        try:
            return await answer
        finally:
            del self.in_flight[number.hex()]
            if answer.cancelled():
                self._abandoned.add(number.hex())

    def on_lines(self, lines: list[bytes]) -> None:
        """See ``ChildListener``."""
        for line in lines:
            if self.child.is_killed:
                return
            try:
                self._take(json.loads(line))
            except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
                self.kill("something wrote to the channel of its process")

    def on_exit(self) -> None:
        """See ``ChildListener``."""
        self.kill(self.child.describe_end())

    def _take(self, message: Any) -> None:
        if self.ready.done():
            number, fields = message
            if number in self._abandoned:
                self._abandoned.remove(number)
                if fields.get("num_hung"):
                    self._pool.retire(self)
                return
            answer = self.in_flight[number]
            if not answer.done():
                answer.set_result(fields)
            return
        self._timer.cancel()
        if "error" in message:
            key, value, rule, remedy = message["error"]
            error = UserError(key, *value or (), rule=rule, remedy=remedy)
            self.child.kill()
            self._fail(error)
            return
        self._pool.actions = message["actions"]
        self.ready.set_result(list(message["schemas"]))

    def _end_late_start(self) -> None:
        reason = f"no greeting within {_START_DEADLINE_S:g} s"
        is_stopped = self.child.is_stopped()
        self.child.kill()
        self._fail(EnvironmentLost(reason) if is_stopped else _StartTooLong(reason))

    def kill(self, reason: str) -> None:
        """Kill the process; its requests fail with ``reason``."""
        self._timer.cancel()
        self.child.kill()
        self._fail(EnvironmentLost(reason))

    def _fail(self, error: Exception) -> None:
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # seen, even if nobody waits for it
        for answer in self.in_flight.values():
            if not answer.done():
                answer.set_exception(error)
        self._pool.on_ended(self)


class EnvironmentPool:
    """The environments of a run, in at most ``num_processes`` child processes.

    Attributes:
        environment: the environment variables of the processes.
        actions: once a process is ready: for each environment of OpenEnv the tool by which the
            policy acts in it, None where its text is the action.

    Example:
        >>> async with EnvironmentPool(setup, num_processes=2) as pool:
        ...     session = pool.open(task)
        ...     observation = await session.step(turn)
        ...     await session.close()
    """

    def __init__(
        self, setup: EnvironmentSetup, *, num_processes: int, environment: Mapping[str, str]
    ) -> None:
        self.setup = setup
        self.environment = environment
        self.actions: Mapping[str, ToolSchema | None] = {}
        self.places = {spec.name: Places(spec.max_running) for spec in setup.openenvs}
        self._num_processes = num_processes
        self._processes: list[_Process] = []
        self._dying: list[_Process] = []

    async def __aenter__(self) -> EnvironmentPool:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def start(self) -> list[ToolSchema]:
        """Start a process, and return the schemas of the tools.

        Raises:
            UserError: a tool cannot be loaded.
            RunFailure: the process ends before that, and so does a second one.
        """
        if not self._processes:
            self._start_process()
        try:
            process = await self._ready(lambda: self._processes[0])
        except EnvironmentLost as error:
            loaded = ", ".join(self.setup.loaded)
            where = f"; it loads {loaded}" if loaded else ""
            raise RunFailure(f"an environment process did not start: {error}{where}") from error
        return process.ready.result()

    async def _ready(self, choose: Callable[[], _Process]) -> _Process:
        """Return a process that is ready. If it is lost while it starts, start another one, once.

        Raises:
            EnvironmentLost: it was not ready in time, or the second one was lost too.
        """
        process = choose()
        try:
            await process.wait_until_ready()
        except _StartTooLong:
            raise
        except EnvironmentLost:
            process = self.choose()
            await process.wait_until_ready()
        return process

    def open(self, task: Task) -> EnvironmentSession:
        """Return the environment of an episode. No process holds it before its first step."""
        return EnvironmentSession(self, task)

    async def play(self, request: Play) -> Mapping[str, Any]:
        """Let an agent of the user play an episode; if this is cancelled, stop the agent.

        Returns:
            ``returned``: the reward that it gave, or None; or ``failure``: why it failed.
        """
        process = self.choose()
        try:
            process = await self._ready(lambda: process)
            return await process.ask(request)
        except EnvironmentLost as error:
            return {"failure": str(error)}
        except asyncio.CancelledError:
            await self._stop(process, request.task.episode_id)
            raise
        finally:
            if process.is_retired:
                self.retire(process)

    async def _stop(self, process: _Process, episode_id: tuple[int, int]) -> None:
        """Stop an agent; a process in which it goes on gets no further episodes."""
        try:
            async with asyncio.timeout(_END_WAIT_S):
                answer = await process.ask(End(episode_id))
        except (TimeoutError, EnvironmentLost):
            answer = {"num_hung": 1}
        process.is_retired = process.is_retired or bool(answer["num_hung"])

    async def close(self) -> None:
        """Kill all processes and wait until they are gone; idempotent."""
        for process in list(self._processes):
            process.kill("the environments are closed")
        dying, self._dying = self._dying, []
        for process in dying:
            await asyncio.to_thread(process.child.reap, _REAP_WAIT_S)

    def on_ended(self, process: _Process) -> None:
        """Forget a process that was killed or died."""
        if process in self._processes:
            self._processes.remove(process)
        self._dying = [dead for dead in self._dying if not dead.child.reap(0)] + [process]

    def choose(self) -> _Process:
        """Return the process for the next step of an episode that no process holds."""
        usable = [process for process in self._processes if not process.is_retired]
        best = min(usable, key=lambda process: process.load, default=None)
        if best is None or (best.load > 0 and len(usable) < self._num_processes):
            return self._start_process()
        return best

    def retire(self, process: _Process) -> None:
        """Give a process no new episodes, and kill it once nothing depends on it."""
        process.is_retired = True
        if process.load == 0 and not process.child.is_killed:
            process.kill("a call of it hangs")

    def step_limit_s(self, task: Task, turn: AssistantTurn | None) -> float:
        """Return the time after which the process of a step is killed."""
        limits = self.setup.limits
        own = next((spec for spec in self.setup.openenvs if spec.name == task.agent), None)
        if own is not None or turn is None:
            # A connection, and an answer.
            return 2 * (own.timeout_s if own is not None else 0.0) + _STEP_GRACE_S
        longest_s = max(
            [
                limits.timeout_s,
                *(_timeout_of(spec.config) for spec in self.setup.tools),
                *(served.timeout_s or 0.0 for served in self.setup.served),
            ]
        )
        num_calls = min(len(turn.calls), limits.max_parallel_calls)
        return max(num_calls, 1) * longest_s + _STEP_GRACE_S

    def _start_process(self) -> _Process:
        process = _Process(self)
        self._processes.append(process)
        return process


class Places:
    """Places for sessions of a server at the same time, of which it may have fewer than asked."""

    def __init__(self, most: int) -> None:
        self._most, self._num_taken = most, 0
        self._changed = asyncio.Condition()

    async def take(self) -> None:
        """Wait for a free place, and take it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_taken < self._most)
            self._num_taken += 1

    async def give_back(self, *, most: int | None = None) -> None:
        """Give a place back; ``most`` is the number of places that the server has, if it tells."""
        async with self._changed:
            self._num_taken -= 1
            if most is not None:
                self._most = max(1, min(self._most, most))
            self._changed.notify()


class EnvironmentSession:
    """The environment of one episode, as the pipeline sees it."""

    def __init__(self, pool: EnvironmentPool, task: Task) -> None:
        self._pool = pool
        self._task = task
        self._held_by: _Process | None = None
        self._places: Places | None = None
        self._last: _Process | None = None
        self._said: list[Mapping[str, Any]] = []

    async def reset(self, *, timeout_s: float) -> Observation:
        """Begin the episode, once there is a place for it.

        A server that is full although fewer sessions than it has are ours is asked again, for
        ``timeout_s`` seconds; then the observation has FAILED.
        """
        places = self._pool.places[self._task.agent]
        waited_s = 0.0
        while True:
            await places.take()
            self._places = places
            try:
                return await self._try(self._pool.choose(), None)
            except ServerFull as error:
                self._places = None
                await places.give_back(most=error.num_places)
                if waited_s >= timeout_s:
                    return _failure(f"the server is full: {error}")
            waited_s += _FULL_WAIT_S
            await asyncio.sleep(_FULL_WAIT_S)

    async def step(self, turn: AssistantTurn) -> Observation:
        """Answer a turn. A lost process or a tool that raised is an observation with FAILED."""
        observation = await self._answer(turn)
        if self._held_by is None:  # the next process must be told
            self._said += [message_of_turn(turn), *observation.messages]
        return observation

    async def _answer(self, turn: AssistantTurn) -> Observation:
        if self._held_by is not None:
            return await self._try(self._held_by, turn, lost="its state is lost: ")
        process = self._pool.choose()
        observation = await self._try(process, turn)
        is_lost = process.child.is_killed and ToolStatus.FAILED in observation.statuses
        return await self._try(self._pool.choose(), turn) if is_lost else observation

    async def close(self) -> None:
        """Release what the environment holds, without waiting longer than a few seconds."""
        process, self._held_by = self._held_by or self._last, None
        places, self._places = self._places, None
        if process is None:
            return
        try:
            async with asyncio.timeout(_END_WAIT_S):
                await process.ask(End(self._task.episode_id))
        except (TimeoutError, EnvironmentLost):
            process.is_retired = True
        finally:
            if places is not None:
                await places.give_back()
        process.episodes.discard(self._task.episode_id)
        if process.is_retired:
            self._pool.retire(process)

    async def _try(
        self, process: _Process, turn: AssistantTurn | None, *, lost: str = ""
    ) -> Observation:
        self._last = process
        try:
            await process.wait_until_ready()
            async with asyncio.timeout(limit_s := self._pool.step_limit_s(self._task, turn)):
                before = () if process is self._held_by else tuple(self._said)
                fields = await process.ask(Step(self._task, turn, before))
            if "full" in fields:
                raise ServerFull(fields["full"], fields["num_places"])
            answer = _read_answer(fields)
        except EnvironmentLost as error:
            return _failure(f"{lost}{error}")
        except TimeoutError:
            is_lost = process.child.is_killed or process.child.is_stopped()
            process.kill(f"a step took longer than {limit_s:g} s")
            if is_lost or self._held_by is not None:
                return _failure(f"its process hung for {limit_s:g} s")
            if turn is None or not turn.calls:
                return _failure(f"no answer within {limit_s:g} s")
            return _hung(turn, limit_s)
        else:
            if answer.is_stateful:
                self._held_by = process
                process.episodes.add(self._task.episode_id)
            process.is_retired = process.is_retired or answer.num_hung > 0
            return answer.observation
        finally:
            if process.is_retired:
                self._pool.retire(process)


def _timeout_of(fields: Mapping[str, Any]) -> float:
    value = fields.get("timeout")
    return float(value) if isinstance(value, int | float) else 0.0


def _failure(detail: str) -> Observation:
    return Observation(done=True, statuses=(ToolStatus.FAILED,), detail=detail)


def _hung(turn: AssistantTurn, limit_s: float) -> Observation:
    """Return the answer to calls that stopped a whole process, which the policy reads."""
    text = f"No result within {limit_s:g} s."
    messages = tuple(result_message(call.call_id, call.name, text=text) for call in turn.calls)
    return Observation(messages, statuses=(ToolStatus.TIMEOUT,) * len(messages))


def _read_answer(fields: Mapping[str, Any]) -> _Answer:
    messages: Sequence[Mapping[str, Any]] = fields["messages"]
    observation = Observation(
        tuple(messages),
        done=bool(fields["done"]),
        rewards=tuple(float(value) for value in fields["rewards"]),
        statuses=tuple(ToolStatus(value) for value in fields["statuses"]),
        detail=str(fields["detail"]),
    )
    return _Answer(observation, bool(fields["is_stateful"]), int(fields["num_hung"]))
