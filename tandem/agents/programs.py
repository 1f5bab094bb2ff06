# SPDX-License-Identifier: Apache-2.0
"""Agents that are programs of the user: commands, and functions in the environment processes.

An agent gets a task and the endpoint, calls it as often as it wants, and ends. It may give a
reward. verl's ``agent.agent_loop_config_path`` names a YAML file with a list of them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tandem.agents.hosting import Play
from tandem.agents.pool import EnvironmentPool
from tandem.agents.setup import AGENTS_KEY, Access, ProgramSpec, Task
from tandem.children.command import CommandEnd, run_command
from tandem.errors import UserError

TASK_VARIABLE = "TANDEM_TASK"
_COMMAND = "command"
_KINDS = (_COMMAND,)
_COMMON = {"name", "kind", "reward", "max_running"}
_MAX_VARIABLE_BYTES = 100_000
"""Linux takes 128 KiB for one variable; a longer task is on standard input only."""
_LOOPBACK = "127.0.0.1,localhost,::1"


@dataclass(frozen=True, slots=True)
class ProgramEnd:
    """The end of an agent.

    Attributes:
        returned: the reward that it gave: a number, or a mapping with ``reward``; None for none.
        failure: why it failed, in one line; "" if it did not.
    """

    returned: Any = None
    failure: str = ""


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
        self._places = {name: asyncio.Semaphore(spec.max_running) for name, spec in specs.items()}

    def place(self, name: str) -> asyncio.Semaphore:
        """Return the places for agents of this name that run at the same time."""
        return self._places[name]

    async def run(self, name: str, task: Task, *, access: Access) -> ProgramEnd:
        """Run an agent to its end; if this is cancelled, stop it."""
        spec = self.specs[name]
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
            self._write_log(spec, end)
            return ProgramEnd(failure=end.describe())
        return ProgramEnd(_last_object(end.output))

    def _write_log(self, spec: ProgramSpec, end: CommandEnd) -> None:
        if self._has_logged:
            return
        self._has_logged = True
        with self._log.open("a", errors="replace") as log:
            log.write(f"The first command of {spec.name} that failed wrote:\n{end.errors}\n")


def without_proxy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with one by which no proxy stands before the endpoint."""
    passes = environment.get("NO_PROXY") or environment.get("no_proxy")
    value = f"{passes},{_LOOPBACK}" if passes else _LOOPBACK
    return {**environment, "NO_PROXY": value, "no_proxy": value}


def described_task(task: Task) -> dict[str, Any]:
    """Return a task as a command gets it in JSON."""
    return {
        "messages": [dict(message) for message in task.messages],
        "data_source": task.data_source,
        "extra_info": dict(task.extra_info),
        "seed": task.seed,
        "episode_id": list(task.episode_id),
    }


def _last_object(output: str) -> Any:
    """Return the object in JSON on the last line of an output; None if it is none."""
    lines = output.strip().splitlines()
    try:
        last = json.loads(lines[-1]) if lines else None
    except ValueError:
        return None
    return last if isinstance(last, dict) and "reward" in last else None


def read_agent_file(path: str) -> dict[str, ProgramSpec]:
    """Read a file in the form of verl's ``agent_loop_config_path``.

    Raises:
        UserError: the file cannot be read, or an entry has another form.
    """
    try:
        loaded: Any = OmegaConf.to_container(OmegaConf.load(Path(path).expanduser()), resolve=True)
    except OSError as error:
        rule = "no such file"
        raise UserError(AGENTS_KEY, path, rule=rule, remedy="Correct the path.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        rule = f"is not valid YAML ({' '.join(str(error).split())[:160]})"
        raise UserError(AGENTS_KEY, path, rule=rule, remedy="Correct the file.") from error
    if not isinstance(loaded, list) or not loaded:
        remedy = "Write a list of {name, _target_} or {name, kind: command, argv}."
        raise UserError(AGENTS_KEY, path, rule="is not a list of agents", remedy=remedy)
    specs: dict[str, ProgramSpec] = {}
    for number, entry in enumerate(cast(list[Any], loaded)):
        try:
            spec = _read_entry(entry)
            if spec.name in specs:
                raise ValueError(f"the name {spec.name!r} is taken")
        except ValueError as error:
            rule = f"entry {number}: {error}"
            raise UserError(AGENTS_KEY, path, rule=rule, remedy="See docs/agents.md.") from error
        specs[spec.name] = spec
    return specs


def _read_entry(entry: Any) -> ProgramSpec:
    """Read an entry; raise ValueError with a clause."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):  # pyright: ignore
        raise ValueError("has no name")
    fields = cast(dict[str, Any], entry)
    reward, max_running = fields.get("reward", "function"), fields.get("max_running", 64)
    if reward not in ("function", "agent"):
        raise ValueError(f"reward={reward!r} is neither function nor agent")
    if not isinstance(max_running, int) or max_running < 1:
        raise ValueError(f"max_running={max_running!r} is not a number above 0")
    common = {"gives_reward": reward == "agent", "max_running": max_running}
    if "kind" in fields:
        return ProgramSpec(fields["name"], argv=_read_argv(fields), **common)
    target = fields.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ValueError("has neither kind nor a _target_ as package.module.function")
    rest = {key: value for key, value in fields.items() if key not in _COMMON | {"_target_"}}
    return ProgramSpec(fields["name"], target=target, arguments=rest, **common)


def _read_argv(fields: Mapping[str, Any]) -> tuple[str, ...]:
    if fields["kind"] not in _KINDS:
        raise ValueError(f"the kind {fields['kind']!r} is not built; it may be {_COMMAND}")
    unknown = sorted(fields.keys() - _COMMON - {"argv"})
    if unknown:
        raise ValueError(f"has an unknown field {unknown[0]!r}")
    argv = fields.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(one, str) for one in argv):
        raise ValueError("argv is not a list of texts")
    if shutil.which(argv[0]) is None:
        raise ValueError(f"the command {argv[0]!r} is not found")
    return tuple(argv)
