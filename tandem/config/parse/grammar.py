# SPDX-License-Identifier: Apache-2.0
"""The arguments of a command: Hydra's override grammar, Hydra's config options, a recipe file.

Only the syntax; which keys exist is ``overrides``' matter. Sweeps are refused.
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
"""What Hydra's lexer may refuse (``~/data``, ``a=b``, ``#``) but can only mean text."""


class Mode(Enum):
    """What an override asks for: ``a=b``; ``+a=b`` and ``++a=b``; ``~a``."""

    SET = "set"
    ADD = "add"
    RESET = "reset"


@dataclass(frozen=True, slots=True)
class Assignment:
    """One key and its value, as somebody wrote it."""

    name: str
    value: Any
    mode: Mode = Mode.SET
    source: str = "command line"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments, sorted. An empty ``config_name`` means none was given."""

    config_path: str
    config_name: str
    recipes: tuple[str, ...]
    overrides: tuple[Assignment, ...]


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Sort arguments into Hydra's options, recipe files and overrides.

    Raises:
        UserError: an argument is none of them, or an override has no valid syntax.
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
                raise UserError(f"{name}: a value must follow. Write {name}=VALUE.")
            options[_OPTIONS[name]] = value if equals else pending.pop(0)
        elif not equals and argument.endswith(_RECIPE_SUFFIXES):
            recipes.append(argument)
        else:
            overrides.append(parse_override(argument))
    if options["path"] and not options["name"]:
        raise UserError(
            f"--config-path={options['path']}: names a folder only. Add --config-name=FILE."
        )
    return CommandLine(options["path"], options["name"], tuple(recipes), tuple(overrides))


def parse_override(argument: str) -> Assignment:
    """One override in Hydra's grammar.

    Raises:
        UserError: it has no valid syntax, or is a sweep.

    Example:
        >>> parse_override("+a.b=[[x-y,z],5e-7]")
        Assignment(name='a.b', value=[['x-y', 'z'], 5e-07], mode=Mode.ADD, source='command line')
    """
    if argument.startswith("-"):
        raise UserError(f"{argument!r}: no such option. tandem plan --help lists the keys.")
    if "=" not in argument and not argument.startswith("~"):
        raise UserError(
            f"{argument!r}: must be key=value or a recipe file (.yaml). Write {argument}=VALUE."
        )
    try:
        override = _parsed(argument)
    except HydraException as error:
        return _plain_text(argument, error)
    return _assignment(override, argument)


@lru_cache(maxsize=1024)
def _parsed(argument: str) -> Override:
    """Hydra takes milliseconds for each, and a planner asks for the same again and again."""
    return OverridesParser.create().parse_override(argument)


def _assignment(override: Override, argument: str) -> Assignment:
    name = override.key_or_group
    if override.is_sweep_override():
        value = argument.partition("=")[2]
        raise UserError(
            f"{name}={value!r}: a sweep over several values is not supported. "
            f"Write a list, '{name}=[{value}]', or quote the text."
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
            f"{argument!r}: not a valid override ({cause}). Write key=value, lists as [a,b], "
            "and quote text with special characters: \"key='...'\"."
        ) from error
    mode = Mode.ADD if argument.startswith("+") else Mode.SET
    return Assignment(match["key"].lstrip("+"), match["text"], mode)
