# SPDX-License-Identifier: Apache-2.0
"""The description of an environment that travels to its child processes, and verl's YAML files.

The files are ``multi_turn.tool_config_path`` and ``multi_turn.interaction_config_path``. They are
parsed here without importing any class of the user; child processes do that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from tandem.errors import UserError

SECTION = "actor_rollout_ref.rollout.multi_turn"
TOOL_KEY = f"{SECTION}.tool_config_path"
FUNCTION_KEY = f"{SECTION}.function_tool_path"
INTERACTION_KEY = f"{SECTION}.interaction_config_path"
AGENTS_KEY = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
ISOLATION_KEY = "actor_rollout_ref.rollout.agent.isolation"
_NATIVE = "native"

Isolation = Literal["strict", "best_effort"]
TruncateSide = Literal["left", "middle", "right"]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A class of tools; ``schema`` is None if the class knows its own."""

    class_name: str
    config: Mapping[str, Any]
    schema: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class InteractionSpec:
    """A class that plays the user, under the name that rows choose it by."""

    name: str
    class_name: str
    config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """An agent of the user that calls the endpoint: a command, or a function.

    Attributes:
        argv: the command; () for a function.
        target: the full name of the function; "" for a command.
        arguments: the keyword arguments of the function beside task and endpoint.
        gives_reward: whether the agent gives the reward, instead of the reward function.
        max_running: the maximum number of its episodes at the same time.
    """

    name: str
    argv: tuple[str, ...] = ()
    target: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gives_reward: bool = False
    max_running: int = 64


@dataclass(frozen=True, slots=True)
class Access:
    """The access of one episode to the endpoint.

    Attributes:
        base_url, api_key, model: what a client of OpenAI's is given.
    """

    base_url: str
    api_key: str
    model: str


@dataclass(frozen=True, slots=True)
class ToolLimits:
    """The limits of calls.

    Attributes:
        max_parallel_calls: the number of calls of one turn that run.
        max_characters: the length of a result; longer ones are cut at ``truncate_side``.
        timeout_s: the time of a call, unless the tool's config has a ``timeout``.
    """

    max_parallel_calls: int = 1
    max_characters: int = 256
    truncate_side: TruncateSide = "middle"
    timeout_s: float = 30.0


@dataclass(frozen=True, slots=True)
class EnvironmentSetup:
    """The environment of a run.

    Attributes:
        function_path: a Python file with ``@function_tool`` functions.
        isolation: whether programs of the policy run although the kernel does not hold them.
        log: the file for prints and for the first traceback of each process; None for stderr.
    """

    tools: tuple[ToolSpec, ...] = ()
    function_path: str | None = None
    interactions: tuple[InteractionSpec, ...] = ()
    programs: tuple[ProgramSpec, ...] = ()
    limits: ToolLimits = field(default_factory=ToolLimits)
    isolation: Isolation = "strict"
    log: str | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """The row that an episode is about. It never holds the ground truth.

    Attributes:
        messages: the prompt.
        seed: the same for all samples of a prompt, so that they see the same world.
        episode_id: uid of the prompt and number of the sample.
        tools: the names of the tools that the row may use.
    """

    messages: tuple[Mapping[str, Any], ...]
    data_source: str
    extra_info: Mapping[str, Any]
    seed: int
    episode_id: tuple[int, int]
    tools: tuple[str, ...]


def read_tool_file(path: str) -> tuple[ToolSpec, ...]:
    """Read a file in the form of verl's ``tool_config_path``.

    Raises:
        UserError: the file cannot be read, or an entry has another form.
    """
    specs: list[ToolSpec] = []
    for number, entry in enumerate(_entries(TOOL_KEY, path, section="tools")):
        where = f"tools[{number}]"
        known = {"class_name", "config", "tool_schema", "mcp"}
        fields = _checked(TOOL_KEY, path, where=where, entry=entry, known=known)
        own = dict(fields.get("config") or {})
        kind = str(own.pop("type", _NATIVE))
        if kind != _NATIVE or "mcp" in fields:
            rule = f"{where}: tools of the type {kind!r} are not built"
            raise UserError(TOOL_KEY, path, rule=rule, remedy="Use tools of the type native.")
        specs.append(ToolSpec(fields["class_name"], {"type": kind, **own}, _schema(path, fields)))
    return tuple(specs)


def read_interaction_file(path: str) -> tuple[InteractionSpec, ...]:
    """Read a file in the form of verl's ``interaction_config_path``; raise as above."""
    specs: list[InteractionSpec] = []
    for number, entry in enumerate(_entries(INTERACTION_KEY, path, section="interaction")):
        where, known = f"interaction[{number}]", {"name", "class_name", "config"}
        fields = _checked(INTERACTION_KEY, path, where=where, entry=entry, known=known)
        own = str(fields["class_name"]).rpartition(".")[2]
        name = str(fields.get("name") or own.removesuffix("Interaction").lower())
        if any(spec.name == name for spec in specs):
            rule = f"{where}: the name {name!r} is taken"
            raise UserError(INTERACTION_KEY, path, rule=rule, remedy="Give it another name.")
        config = {**(fields.get("config") or {}), "name": name}
        specs.append(InteractionSpec(name, fields["class_name"], config))
    return tuple(specs)


def _schema(path: str, fields: Mapping[str, Any]) -> Mapping[str, Any] | None:
    schema = fields.get("tool_schema")
    function = schema.get("function") if isinstance(schema, dict) else None  # pyright: ignore
    if schema is not None and not (isinstance(function, dict) and "name" in function):
        rule = f"the tool_schema of {fields['class_name']} has no function with a name"
        remedy = "Write it as {type: function, function: {name: .., parameters: ..}}."
        raise UserError(TOOL_KEY, path, rule=rule, remedy=remedy)
    return cast(Mapping[str, Any] | None, schema)


def _entries(key: str, path: str, *, section: str) -> list[Any]:
    file = Path(path).expanduser()
    try:
        loaded = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except OSError as error:
        raise UserError(key, path, rule="no such file", remedy="Correct the path.") from error
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        rule = f"is not valid YAML ({' '.join(str(error).split())[:160]})"
        raise UserError(key, path, rule=rule, remedy="Correct the file.") from error
    entries: Any = loaded.get(section) if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not entries:
        rule = f"has no list under {section!r}"
        raise UserError(key, path, rule=rule, remedy="Write the file in verl's form.")
    return cast(list[Any], entries)


def _checked(key: str, path: str, *, where: str, entry: Any, known: set[str]) -> dict[str, Any]:
    if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):  # pyright: ignore
        raise UserError(key, path, rule=f"{where} has no class_name", remedy="Name a class.")
    fields = cast(dict[str, Any], entry)
    unknown = sorted(fields.keys() - known)
    if unknown:
        rule = f"{where} has an unknown field {unknown[0]!r}"
        raise UserError(key, path, rule=rule, remedy=f"It may have {', '.join(sorted(known))}.")
    if "." not in fields["class_name"]:
        rule = f"{where}: class_name {fields['class_name']!r} is not package.module.Class"
        raise UserError(key, path, rule=rule, remedy="Write the full name of the class.")
    if not isinstance(fields.get("config"), dict | None):
        raise UserError(key, path, rule=f"{where}: config is not a mapping", remedy="Correct it.")
    return fields
