# SPDX-License-Identifier: Apache-2.0
"""The syntax of a command's arguments: Hydra's overrides, Hydra's config options, recipe files.

``overrides`` checks the keys. Sweeps are refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from tandem.errors import UserError

_OPTIONS = {
    "--config-path": "path",
    "-cp": "path",
    "--config-name": "name",
    "-cn": "name",
}
_RECIPE_SUFFIXES = (".yaml", ".yml")
_PLAIN_TEXT = re.compile(r"(?P<key>[+]{0,2}[\w.@-]+)=(?P<text>[^\[\]{}()'\",]+)")
"""Overrides with plain text, which Hydra's lexer may refuse (``~/data``, ``a=b``, ``#``)."""


class Mode(Enum):
    """The mode of an override: ``a=b`` sets, ``+a=b`` and ``++a=b`` add, ``~a`` resets."""

    SET = "set"
    ADD = "add"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A key and its value, as the user wrote them."""

    name: str
    value: Any
    mode: Mode = Mode.SET
    source: str = "command line"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments of a command by kind; ``config_name`` is "" if it was not given."""

    config_path: str
    config_name: str
    recipes: tuple[str, ...]
    overrides: tuple[Assignment, ...]


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Sort arguments into Hydra's options, recipe files and overrides.

    Raises:
        UserError: an argument is none of these, or an override has no valid syntax.
    """
    options = {"path": "", "name": ""}
    recipes: list[str] = []
    overrides: list[Assignment] = []
    pending = [argument for argument in arguments if argument.strip()]
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        if name in _OPTIONS:
            if not equals and not pending:
                raise UserError(name, rule="a value must follow", remedy=f"Write {name}=VALUE.")
            options[_OPTIONS[name]] = value if equals else pending.pop(0)
        elif not equals and argument.endswith(_RECIPE_SUFFIXES):
            recipes.append(argument)
        else:
            overrides.append(parse_override(argument))
    if options["path"] and not options["name"]:
        raise UserError(
            f"--config-path={options['path']}",
            rule="names a folder only",
            remedy="Add --config-name=FILE.",
        )
    return CommandLine(options["path"], options["name"], tuple(recipes), tuple(overrides))


def parse_override(argument: str) -> Assignment:
    """Parse one override in Hydra's grammar.

    Raises:
        UserError: the override has no valid syntax, or is a sweep.

    Example:
        >>> parse_override("+a.b=[[x-y,z],5e-7]")
        Assignment(name='a.b', value=[['x-y', 'z'], 5e-07], mode=Mode.ADD, source='command line')
    """
    if argument.startswith("-"):
        raise UserError(
            repr(argument), rule="no such option", remedy="tandem plan --help lists the keys."
        )
    if "=" not in argument and not argument.startswith("~"):
        raise UserError(
            repr(argument),
            rule="must be key=value or a recipe file (.yaml)",
            remedy=f"Write {argument}=VALUE.",
        )
    try:
        override = _parsed(argument)
    except HydraException as error:
        return _plain_text(argument, error)
    return _assignment(override, argument)


@lru_cache(maxsize=1024)
def _parsed(argument: str) -> Override:
    # Hydra takes milliseconds for each override, and the planner parses the same ones repeatedly.
    return OverridesParser.create().parse_override(argument)


def _assignment(override: Override, argument: str) -> Assignment:
    name = override.key_or_group
    if override.is_sweep_override():
        value = argument.partition("=")[2]
        raise UserError(
            name,
            value,
            rule="a sweep over several values is not supported",
            remedy=f"Write a list, '{name}=[{value}]', or quote the text.",
        )
    if override.type is OverrideType.DEL:
        return Assignment(name, None, Mode.RESET)
    mode = Mode.SET if override.type is OverrideType.CHANGE else Mode.ADD
    return Assignment(name, override.value(), mode)


def _plain_text(argument: str, error: HydraException) -> Assignment:
    match = _PLAIN_TEXT.fullmatch(argument)
    if match is None:
        cause = str(error).splitlines()[0]
        raise UserError(
            repr(argument),
            rule=f"not a valid override ({cause})",
            remedy="Write key=value, lists as [a,b], and quote text with special characters: "
            "\"key='...'\".",
        ) from error
    mode = Mode.ADD if argument.startswith("+") else Mode.SET
    return Assignment(match["key"].lstrip("+"), match["text"], mode)
