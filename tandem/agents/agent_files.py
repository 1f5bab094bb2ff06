# SPDX-License-Identifier: Apache-2.0
"""The file of agents: verl's ``agent.agent_loop_config_path``, a YAML list of entries with names.

An entry is a function (``_target_``), a command, or an environment of OpenEnv. They are parsed here
without importing anything of the user.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tandem.agents.entries import require_url, unknown_field
from tandem.agents.setup import AGENTS_KEY, OpenEnvSpec, ProgramSpec
from tandem.config.parse.yaml_content import read_yaml
from tandem.errors import UserError

_COMMAND, _OPENENV = "command", "openenv"
_KINDS = (_COMMAND, _OPENENV)
_COMMON = {"name", "kind", "reward", "max_running"}
_REWARDS = {"function": False, "agent": True}
_OF_OPENENV = {"url", "headers", "action_field", "tool", "observation_field", "reset", "timeout"}


@dataclass(frozen=True, slots=True)
class AgentFile:
    """The content of a file of agents, whose names all differ."""

    programs: tuple[ProgramSpec, ...] = ()
    openenvs: tuple[OpenEnvSpec, ...] = ()


def read_agent_file(path: str) -> AgentFile:
    """Read a file in the form of verl's ``agent_loop_config_path``.

    Raises:
        UserError: the file cannot be read, or an entry has another form.
    """
    loaded = read_yaml(path, key=AGENTS_KEY, resolved=True)
    if not isinstance(loaded, list) or not loaded:
        remedy = "Write a list of {name, _target_} or {name, kind: command, argv}."
        raise UserError(AGENTS_KEY, path, rule="is not a list of agents", remedy=remedy)
    specs: dict[str, ProgramSpec | OpenEnvSpec] = {}
    for number, entry in enumerate(cast(list[Any], loaded)):
        try:
            spec = _read_entry(entry)
            if spec.name in specs:
                raise ValueError(f"the name {spec.name!r} is taken")
        except ValueError as error:
            rule = f"entry {number}: {error}"
            raise UserError(AGENTS_KEY, path, rule=rule, remedy="See docs/own_agent.md.") from error
        specs[spec.name] = spec
    return AgentFile(
        tuple(spec for spec in specs.values() if isinstance(spec, ProgramSpec)),
        tuple(spec for spec in specs.values() if isinstance(spec, OpenEnvSpec)),
    )


def _read_entry(entry: Any) -> ProgramSpec | OpenEnvSpec:
    """Read an entry; raise ValueError with a clause."""
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):  # pyright: ignore
        raise ValueError("has no name")
    fields = cast(dict[str, Any], entry)
    kind = fields.get("kind")
    if kind is not None and kind not in _KINDS:
        raise ValueError(f"the kind {kind!r} is not built; it may be {', '.join(_KINDS)}")
    reward = fields.get("reward", "agent" if kind == _OPENENV else "function")
    max_running = fields.get("max_running", 64)
    if not isinstance(reward, str) or reward not in _REWARDS:
        raise ValueError(f"reward={reward!r} is neither function nor agent")
    if not _is_count(max_running):
        raise ValueError(f"max_running={max_running!r} is not a number above 0")
    common = {"gives_reward": _REWARDS[reward], "max_running": max_running}
    if kind == _COMMAND:
        num_processes = fields.get("processes", 0)
        if "processes" in fields and not _is_count(num_processes):
            raise ValueError(f"processes={num_processes!r} is not a number above 0")
        argv = _read_argv(fields)
        return ProgramSpec(fields["name"], argv=argv, num_processes=num_processes, **common)
    if kind == _OPENENV:
        return _read_openenv(fields, common)
    target = fields.get("_target_")
    if not isinstance(target, str) or "." not in target:
        raise ValueError("has neither kind nor a _target_ as package.module.function")
    rest = {key: value for key, value in fields.items() if key not in _COMMON | {"_target_"}}
    if not all(isinstance(key, str) for key in cast(dict[Any, Any], rest)):
        raise ValueError("has a field whose name is no text")
    return ProgramSpec(fields["name"], target=target, arguments=rest, **common)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _read_argv(fields: Mapping[str, Any]) -> tuple[str, ...]:
    _require_known(fields, {"argv", "processes"})
    argv = fields.get("argv")
    if not isinstance(argv, list) or not argv or not all(isinstance(one, str) for one in argv):
        raise ValueError("argv is not a list of texts")
    if shutil.which(argv[0]) is None:
        raise ValueError(f"the command {argv[0]!r} is not found")
    return tuple(argv)


def _read_openenv(fields: Mapping[str, Any], common: Mapping[str, Any]) -> OpenEnvSpec:
    _require_known(fields, _OF_OPENENV)
    url = require_url(str(fields.get("url", "")))
    timeout_s = fields.get("timeout", 60.0)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or timeout_s <= 0:
        raise ValueError(f"timeout={timeout_s!r} is not a number of seconds above 0")
    for name in ("headers", "reset"):
        if not isinstance(fields.get(name), dict | None):
            raise ValueError(f"{name} is not a mapping")
    for name in ("action_field", "observation_field", "tool"):
        if not isinstance(fields.get(name), str | None):
            raise ValueError(f"{name} is not a name")
    headers = cast(dict[Any, Any], fields.get("headers") or {})
    return OpenEnvSpec(
        fields["name"],
        url.rstrip("/"),
        headers={str(name): str(value) for name, value in headers.items()},
        action_field=fields.get("action_field"),
        tool=fields.get("tool") or "step",
        observation_field=fields.get("observation_field"),
        reset=cast(dict[str, Any], fields.get("reset") or {}),
        timeout_s=float(timeout_s),
        **common,
    )


def _require_known(fields: Mapping[str, Any], own: set[str]) -> None:
    unknown = unknown_field(fields, _COMMON | own)
    if unknown is not None:
        raise ValueError(f"has an unknown field {unknown!r}")
