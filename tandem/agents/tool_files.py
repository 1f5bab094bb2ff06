# SPDX-License-Identifier: Apache-2.0
"""verl's YAML files of tools and of simulated users.

The files are ``multi_turn.tool_config_path`` and ``multi_turn.interaction_config_path``. They are
parsed here without importing any class of the user; child processes do that. Tools of the type
``mcp`` name servers, in the form of the files of other programs that speak their protocol.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from tandem.agents.entries import require_url, unknown_field
from tandem.agents.setup import (
    INTERACTION_KEY,
    TOOL_KEY,
    InteractionSpec,
    ServedTools,
    ServerSpec,
    ToolSpec,
)
from tandem.config.parse.yaml_content import read_yaml
from tandem.errors import UserError

_NATIVE, _MCP = "native", "mcp"
_SERVERS = "mcpServers"
_CLASSES_OF_VERL = (
    "verl.tools.mcp_base_tool.MCPBaseTool",
    "verl.tools.mcp_search_tool.MCPSearchTool",
)
_WITHOUT_EFFECT = ("rate_limit", "num_workers")
_OF_CONFIG = {"timeout", "per_episode", *_WITHOUT_EFFECT}
_OF_MCP = {"mcp_servers_config_path", "servers", "tool_selected_list"}
_OF_SERVER = {"command", "args", "env", "cwd", "url", "headers", "auth_token", "type", "transport"}
_TRANSPORTS = (None, "stdio", "http", "streamable-http", "streamable_http")


@dataclass(frozen=True, slots=True)
class ToolFile:
    """The content of a file of tools.

    Attributes:
        notes: one line for each thing in the file that has no effect.
    """

    classes: tuple[ToolSpec, ...] = ()
    served: tuple[ServedTools, ...] = ()
    notes: tuple[str, ...] = ()


def read_tool_file(path: str) -> ToolFile:
    """Read a file in the form of verl's ``tool_config_path``.

    Raises:
        UserError: the file cannot be read, or an entry has another form.
    """
    classes: list[ToolSpec] = []
    served: list[ServedTools] = []
    notes: list[str] = []
    for number, entry in enumerate(_entries(TOOL_KEY, path, section="tools")):
        where = f"tools[{number}]"
        known = {"class_name", "config", "tool_schema", "mcp"}
        is_served = _type_of(entry) == _MCP
        fields = _checked(
            TOOL_KEY, path, where=where, entry=entry, known=known, needs_class=not is_served
        )
        own = dict(fields.get("config") or {})
        kind = str(own.pop("type", _NATIVE))
        if kind == _MCP:
            try:
                served.append(_read_served(fields, own))
            except ValueError as error:
                rule = f"{where}: {error}"
                raise UserError(TOOL_KEY, path, rule=rule, remedy="See docs/agents.md.") from error
            notes += [f"{where}: {name} has no effect" for name in _WITHOUT_EFFECT if name in own]
        elif kind == _NATIVE and "mcp" not in fields:
            classes.append(
                ToolSpec(fields["class_name"], {"type": kind, **own}, _schema(path, fields))
            )
        else:
            rule = f"{where}: the type is {kind!r}, with the fields {', '.join(sorted(fields))}"
            remedy = "Set config.type to native, or to mcp with a field mcp."
            raise UserError(TOOL_KEY, path, rule=rule, remedy=remedy)
    return ToolFile(tuple(classes), tuple(served), tuple(notes))


def _type_of(entry: Any) -> Any:
    given = entry.get("config") if isinstance(entry, dict) else None  # pyright: ignore
    return given.get("type") if isinstance(given, dict) else None  # pyright: ignore


def _read_served(fields: Mapping[str, Any], given: Mapping[str, Any]) -> ServedTools:
    """Read an entry of the type mcp; raise ValueError with a clause."""
    name, mcp = fields.get("class_name"), fields.get("mcp")
    if name not in (None, *_CLASSES_OF_VERL):
        raise ValueError(f"class_name {name!r} reads results of its own, which is not built")
    if "tool_schema" in fields:
        raise ValueError("tool_schema is the server's to tell; leave it out")
    if not isinstance(mcp, dict):
        raise ValueError("has no mapping mcp with servers, or with mcp_servers_config_path")
    _require_known(given, _OF_CONFIG, what="config")
    own = cast(dict[str, Any], mcp)
    _require_known(own, _OF_MCP, what="mcp")
    selected, timeout_s = own.get("tool_selected_list") or (), given.get("timeout")
    if not isinstance(selected, list | tuple):
        raise ValueError("tool_selected_list is not a list of names")
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if timeout_s is not None and not (is_number and timeout_s > 0):
        raise ValueError(f"config.timeout={timeout_s!r} is not a number of seconds above 0")
    return ServedTools(
        servers=tuple(_read_server(str(name), one) for name, one in _servers(own).items()),
        selected=tuple(map(str, cast(list[Any], selected))),
        timeout_s=None if timeout_s is None else float(timeout_s),
        is_per_episode=bool(given.get("per_episode", False)),
    )


def _servers(mcp: Mapping[str, Any]) -> dict[str, Any]:
    """Return the servers of an entry, from the entry or from the file that it names."""
    path, inline = mcp.get("mcp_servers_config_path"), mcp.get("servers")
    if (path is None) == (inline is None):
        raise ValueError("mcp has not exactly one of servers and mcp_servers_config_path")
    found = inline if path is None else _load_servers(str(path))
    if not isinstance(found, dict) or not found:
        where = "servers" if path is None else f"{_SERVERS} of {path}"
        raise ValueError(f"{where} is not a mapping of servers by their names")
    return cast(dict[str, Any], found)


def _load_servers(path: str) -> Any:
    try:
        loaded = read_yaml(path, key=TOOL_KEY, resolved=True)
    except UserError as error:
        raise ValueError(f"{path}: {error.rule}") from error
    return loaded.get(_SERVERS) if isinstance(loaded, dict) else None


def _read_server(name: str, entry: Any) -> ServerSpec:
    if not isinstance(entry, dict):
        raise ValueError(f"the server {name} is not a mapping")
    fields = cast(dict[str, Any], entry)
    _require_known(fields, _OF_SERVER, what=f"the server {name}")
    transport = fields.get("type") or fields.get("transport")
    if transport not in _TRANSPORTS:
        raise ValueError(f"the server {name} speaks {transport!r}; stdio and http are built")
    if ("command" in fields) == ("url" in fields):
        raise ValueError(f"the server {name} has not exactly one of command and url")
    if "command" in fields:
        arguments = fields.get("args") or []
        argv = (fields["command"], *(arguments if isinstance(arguments, list) else [arguments]))
        if not all(isinstance(one, str) for one in argv):
            raise ValueError(f"the server {name}: command and args are not texts; quote them")
        if shutil.which(argv[0]) is None:
            raise ValueError(f"the server {name}: the command {argv[0]!r} is not found")
        if not isinstance(fields.get("cwd"), str | None):
            raise ValueError(f"the server {name}: cwd is not a path")
        variables = _texts(fields.get("env"), what=f"the server {name}: env")
        return ServerSpec(name, argv, variables, fields.get("cwd"))
    try:
        url = require_url(str(fields["url"]))
    except ValueError as error:
        raise ValueError(f"the server {name}: {error}") from error
    headers = _texts(fields.get("headers"), what=f"the server {name}: headers")
    if fields.get("auth_token"):
        headers["Authorization"] = f"Bearer {fields['auth_token']}"
    return ServerSpec(name, url=url, headers=headers)


def _texts(value: Any, *, what: str) -> dict[str, str]:
    if not isinstance(value, dict | None):
        raise ValueError(f"{what} is not a mapping")
    return {str(name): str(text) for name, text in (cast(dict[Any, Any], value) or {}).items()}


def _require_known(fields: Mapping[str, Any], known: set[str], *, what: str) -> None:
    unknown = unknown_field(fields, known)
    if unknown is not None:
        names = ", ".join(sorted(known))
        raise ValueError(f"{what} has an unknown field {unknown!r}; it may have {names}")


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
    loaded = read_yaml(path, key=key, resolved=True)
    entries: Any = loaded.get(section) if isinstance(loaded, dict) else None
    if not isinstance(entries, list) or not entries:
        rule = f"has no list under {section!r}"
        raise UserError(key, path, rule=rule, remedy="Write the file in verl's form.")
    return cast(list[Any], entries)


def _checked(
    key: str, path: str, *, where: str, entry: Any, known: set[str], needs_class: bool = True
) -> dict[str, Any]:
    fields = cast(dict[str, Any], entry) if isinstance(entry, dict) else {}
    name = fields.get("class_name")
    if needs_class and not isinstance(name, str):
        raise UserError(key, path, rule=f"{where} has no class_name", remedy="Name a class.")
    unknown = unknown_field(fields, known)
    if unknown is not None:
        rule = f"{where} has an unknown field {unknown!r}"
        raise UserError(key, path, rule=rule, remedy=f"It may have {', '.join(sorted(known))}.")
    if isinstance(name, str) and "." not in name:
        rule = f"{where}: class_name {name!r} is not package.module.Class"
        raise UserError(key, path, rule=rule, remedy="Write the full name of the class.")
    if not isinstance(fields.get("config"), dict | None):
        raise UserError(key, path, rule=f"{where}: config is not a mapping", remedy="Correct it.")
    return fields
