# SPDX-License-Identifier: Apache-2.0
"""Agents that are programs of the user: commands, and functions in the environment processes.

A command plays one episode, or many of them (``shared_commands``).

An agent gets a task and the endpoint, calls it as often as it wants, and ends. It may give a
reward.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tandem.agents.hosting import Play
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import Access, ProgramEnd, ProgramSpec, Task
from tandem.agents.shared_commands import SharedCommand
from tandem.children.command import run_command

TASK_VARIABLE = "TANDEM_TASK"
_MAX_VARIABLE_BYTES = 100_000
"""Linux takes 128 KiB for one variable; a longer task is on standard input only."""
_LOOPBACK = "127.0.0.1,localhost,::1"
_SHOWN_CHARACTERS = 80
_EXPECTED = 'the last line must be one whole object in JSON, such as {"reward": 1.0}'


class Programs:
    """The agents of a run that are programs.

    Args:
        pool: the processes that functions run in.
        environment: the environment variables of commands.
        log: the file for what the first command that failed printed as errors.
    """

    def __init__(
        self,
        specs: Mapping[str, ProgramSpec],
        *,
        pool: EnvironmentPool,
        environment: Mapping[str, str],
        log: Path,
    ) -> None:
        self.specs = specs
        self._pool = pool
        self._environment = environment
        self._log = log
        self._has_logged = False
        self._shared = {
            name: SharedCommand(
                spec, environment=without_proxy(environment), log=self._writer(name)
            )
            for name, spec in specs.items()
            if spec.num_processes
        }
        self._places = {name: asyncio.Semaphore(spec.max_running) for name, spec in specs.items()}

    def place(self, name: str) -> asyncio.Semaphore:
        """Return the places for agents of this name that run at the same time."""
        return self._places[name]

    async def run(self, name: str, task: Task, *, access: Access) -> ProgramEnd:
        """Run an agent to its end; if this is cancelled, stop it."""
        spec = self.specs[name]
        if name in self._shared:
            return await self._shared[name].play(described_task(task), access)
        if spec.argv:
            return await self._run_command(spec, task, access=access)
        fields = await self._pool.play(Play(name, task, access))
        return ProgramEnd(fields.get("returned"), str(fields.get("failure", "")))

    async def _run_command(self, spec: ProgramSpec, task: Task, *, access: Access) -> ProgramEnd:
        described = json.dumps(described_task(task), default=str)
        environment = {
            **without_proxy(self._environment),
            "OPENAI_BASE_URL": access.base_url,
            "OPENAI_API_KEY": access.api_key,
        }
        if len(described.encode()) <= _MAX_VARIABLE_BYTES:
            environment[TASK_VARIABLE] = described
        stdin = described.encode() + b"\n"
        try:
            end = await run_command(spec.argv, environment=environment, stdin=stdin)
        except OSError as error:
            return ProgramEnd(failure=f"{spec.argv[0]} cannot be started: {error.strerror}")
        if end.exit_code:
            self._writer(spec.name)(end.errors)
            return ProgramEnd(failure=end.describe())
        return _read_end(end.output, gives_reward=spec.gives_reward)

    async def close(self) -> None:
        """Kill the processes of commands that play many episodes; idempotent."""
        for shared in self._shared.values():
            await shared.close()

    def _writer(self, name: str) -> Callable[[str], None]:
        """Return what writes the errors of the first command that failed to the log."""

        def write(errors: str) -> None:
            if self._has_logged:
                return
            self._has_logged = True
            with self._log.open("a", errors="replace") as log:
                log.write(f"The first command of {name} that failed wrote:\n{errors}\n")

        return write


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with one by which no proxy stands before the endpoint."""
    passes = environment.get("NO_PROXY") or environment.get("no_proxy")
    value = f"{passes},{_LOOPBACK}" if passes else _LOOPBACK
    return {**environment, "NO_PROXY": value, "no_proxy": value}


def described_task(task: Task) -> dict[str, Any]:
    """Return a task as a command gets it in JSON, which has no number that is not finite."""
    return {
        "messages": [_with_nulls(message) for message in task.messages],
        "data_source": task.data_source,
        "extra_info": _with_nulls(task.extra_info),
        "seed": task.seed,
        "episode_id": list(task.episode_id),
    }


def _with_nulls(value: Any) -> Any:
    """Return a value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _with_nulls(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_with_nulls(one) for one in value]
    return value


def _read_end(output: str, *, gives_reward: bool) -> ProgramEnd:
    """Return the end of a command: with the object in JSON on the last line of its output.

    A command that must give a reward and gives none has failed.
    """
    # Other ends of lines, such as U+2028, may stand in a text of JSON; these two may not.
    line = output.strip().replace("\r", "\n").rpartition("\n")[2]
    try:
        last = json.loads(line)
    except (ValueError, RecursionError):
        last = None
    if isinstance(last, dict) and "reward" in last:
        return ProgramEnd(last)
    if not gives_reward:
        return ProgramEnd()
    if not line:
        return ProgramEnd(failure=f"it printed nothing, and {_EXPECTED}")
    begin = line[:_SHOWN_CHARACTERS]
    return ProgramEnd(failure=f"its last line begins with {begin!r}, and {_EXPECTED}")
