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

from tandem.config.parse.names import TRL_NAMES
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

_HOME = re.compile(r"([\[,]\s*)(~[^\[\]{},'\"]*)")
"""An entry of a list that begins with ``~``, which Hydra's lexer refuses unless it is quoted."""
_TYPOGRAPHIC = "\u2018\u2019\u201c\u201d\u201e\u2013\u2014"


class Mode(Enum):
    """The mode of an override: ``a=b`` sets, ``+a=b`` and ``++a=b`` add, ``~a`` resets.

    An assignment of the mode DEFAULT replaces a default of the schema; the user has not set it.
    """

    SET = "set"
    ADD = "add"
    RESET = "reset"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Assignment:
    """A key and its value, as the user wrote them."""

    name: str
    value: Any
    mode: Mode = Mode.SET
    source: str = "command line"


@dataclass(frozen=True, slots=True)
class CommandLine:
    """The arguments of a command by kind.

    Attributes:
        config_names: the values of ``--config-name`` in order. The last one names a file or one of
            verl's configurations; earlier ones only give their defaults.
    """

    config_path: str
    config_names: tuple[str, ...]
    recipes: tuple[str, ...]
    overrides: tuple[Assignment, ...]


def parse_arguments(arguments: Sequence[str]) -> CommandLine:
    """Sort arguments into Hydra's options, recipe files and overrides.

    Raises:
        UserError: an argument is none of these, or an override has no valid syntax.
    """
    options: dict[str, list[str]] = {"path": [], "name": []}
    recipes: list[str] = []
    overrides: list[Assignment] = []
    pending = [argument for argument in arguments if argument.strip()]
    while pending:
        argument = pending.pop(0)
        name, equals, value = argument.partition("=")
        if name in _OPTIONS:
            if not equals and not pending:
                raise UserError(name, rule="a value must follow", remedy=f"Write {name}=VALUE.")
            options[_OPTIONS[name]].append(value if equals else pending.pop(0))
        elif not equals and argument.endswith(_RECIPE_SUFFIXES):
            recipes.append(argument)
        else:
            _check_spelling(argument, pending)
            overrides.append(parse_override(argument))
    if options["path"] and not options["name"]:
        raise UserError(
            f"--config-path={options['path'][-1]}",
            rule="names a folder only",
            remedy="Add --config-name=FILE.",
        )
    path = options["path"][-1] if options["path"] else ""
    return CommandLine(path, tuple(options["name"]), tuple(recipes), tuple(overrides))


def parse_override(argument: str) -> Assignment:
    """Parse one override in Hydra's grammar.

    Raises:
        UserError: the override has no valid syntax, or is a sweep.

    Example:
        >>> parse_override("+a.b=[[x-y,z],5e-7]")
        Assignment(name='a.b', value=[['x-y', 'z'], 5e-07], mode=Mode.ADD, source='command line')
    """
    if argument.startswith("-"):
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        meant = TRL_NAMES.get(name, ("",))[0]
        raise UserError(
            repr(argument),
            rule="no such option",
            remedy=f"Keys are written as KEY=VALUE: {meant}=VALUE."
            if meant
            else "Keys are written as KEY=VALUE; tandem keys lists them.",
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


def _check_spelling(argument: str, following: Sequence[str]) -> None:
    """Raise UserError for typographic quotes and dashes, for spaces around ``=``, and for bytes
    that are not UTF-8: Python reads them as lone surrogates, which no record can hold.
    """
    if any("\ud800" <= sign <= "\udfff" for sign in argument):
        raise UserError(
            repr(argument),
            rule="has bytes that are no text in UTF-8",
            remedy="Rename the file or folder, or set a UTF-8 locale, such as LC_ALL=C.UTF-8.",
        )
    wrong = next((sign for sign in argument if sign in _TYPOGRAPHIC), None)
    if wrong is not None:
        raise UserError(
            repr(argument),
            rule=f"has the typographic sign {wrong}",
            remedy="Write straight quotes (' or \") and the hyphen (-).",
        )
    if "=" not in argument and following and following[0].startswith("="):
        value = "".join(following[:2]).lstrip("=") if following[0] == "=" else following[0][1:]
        raise UserError(
            repr(argument),
            rule="there are spaces around =",
            remedy=f"Write {argument}={value}.",
        )


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
            rule="it has several values, which only tandem sweep takes",
            remedy=f"Write a list, '{name}=[{value}]', or quote the text.",
        )
    if override.type is OverrideType.DEL:
        return Assignment(name, None, Mode.RESET)
    mode = Mode.SET if override.type is OverrideType.CHANGE else Mode.ADD
    return Assignment(name, override.value(), mode)


def _plain_text(argument: str, error: HydraException) -> Assignment:
    match = _PLAIN_TEXT.fullmatch(argument)
    quoted = _HOME.sub(r"\1'\2'", argument)
    if match is None and quoted != argument:
        return parse_override(quoted)
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
