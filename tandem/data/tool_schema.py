# SPDX-License-Identifier: Apache-2.0
"""The schema of a tool from the signature and the Google-style docstring of a function.

It follows transformers' ``get_json_schema``, which takes seconds to import in a child process.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_KINDS: Mapping[Any, str] = {
    int: "integer",
    float: "number",
    str: "string",
    bool: "boolean",
    dict: "object",
    list: "array",
    tuple: "array",
    type(None): "null",
    Any: "string",
}
_ARGUMENT = re.compile(r"^\s*(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")
_SECTION = re.compile(r"^\s*(Args|Arguments|Returns|Raises|Yields|Examples?|Note|Attributes)\s*:")


def schema_of_function(function: Callable[..., Any], *, name: str) -> dict[str, Any]:
    """Return the schema of ``function`` in OpenAI's form.

    Raises:
        ValueError: a parameter has no type or no description, or is ``*args`` or ``**kwargs``.
    """
    summary, described = _read_docstring(inspect.getdoc(function) or "")
    if not summary:
        raise ValueError(f"the tool {name!r} has no docstring")
    hints = get_type_hints(function)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"the tool {name!r} has *{parameter.name}, which no schema expresses")
        if parameter.name not in hints:
            raise ValueError(f"the parameter {parameter.name!r} of the tool {name!r} has no type")
        if parameter.name not in described:
            raise ValueError(
                f"the parameter {parameter.name!r} of the tool {name!r} has no line under Args:"
            )
        schema = _schema_of_type(hints[parameter.name])
        properties[parameter.name] = {**schema, "description": described[parameter.name]}
        if parameter.default is parameter.empty:
            required.append(parameter.name)
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if required:
        parameters["required"] = required
    return {
        "type": "function",
        "function": {"name": name, "description": summary, "parameters": parameters},
    }


def _schema_of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return {"type": _KINDS[type(arguments[0])], "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        kinds = [_schema_of_type(one) for one in arguments if one is not type(None)]
        schema = kinds[0] if len(kinds) == 1 else {"type": [kind["type"] for kind in kinds]}
        return {**schema, "nullable": True} if type(None) in arguments else schema
    if origin is list and arguments:
        return {"type": "array", "items": _schema_of_type(arguments[0])}
    return {"type": _KINDS.get(origin or hint, "object")}


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Return the text before the first section, and the description of each argument."""
    summary: list[str] = []
    described: dict[str, str] = {}
    section, last = "", ""
    for line in text.splitlines():
        match = _SECTION.match(line)
        if match:
            section = match[1]
        elif not section:
            summary.append(line)
        elif section in ("Args", "Arguments"):
            argument = _ARGUMENT.match(line)
            if argument:
                last = argument[1]
                described[last] = argument[2].strip()
            elif last and line.strip():
                described[last] += " " + line.strip()
    return "\n".join(summary).strip(), described
