# SPDX-License-Identifier: Apache-2.0
"""``tandem keys [sft] [WORD ...]`` and the ``--help`` of commands that take keys.

Both list keys that have an effect: name, default, choices, condition and description. They read
only the schemas, and need no torch.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import BaseModel

from tandem.config.parse.keys import Key, in_override_grammar, keys_of
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.verl_defaults import VERL_DEFAULTS
from tandem.errors import UserError

WIDTH = 92
SCHEMAS: dict[str, type[BaseModel]] = {"train": RunConfig, "plan": RunConfig, "sft": SftConfig}
"""The commands that take keys."""


def run(arguments: Sequence[str]) -> int:
    """Print the keys whose name or description has all words; return the exit code.

    The word ``sft`` at the beginning means the keys of ``tandem sft``. If the names of some keys
    have all words, only those keys are printed.
    """
    schema = SftConfig if arguments[:1] == ["sft"] else RunConfig
    words = [word.lower() for word in (arguments[1:] if schema is SftConfig else arguments)]
    if {"-h", "--help"} & set(words):
        print("usage: tandem keys [sft] [WORD ...]")
        return 0
    keys = [key for key in keys_of(schema).values() if not key.ignored]
    named = [key for key in keys if all(word in key.name.lower() for word in words)]
    texts = {key.name: f"{key.name} {key.description}".lower() for key in keys}
    found = named or [key for key in keys if all(word in texts[key.name] for word in words)]
    if not found:
        raise UserError(
            repr(" ".join(words)),
            rule="no key has these words in its name or description",
            remedy="tandem keys lists all keys of train, and tandem keys sft those of sft.",
        )
    for key in found:
        print(entry(key, key.default))
    return 0


def print_help(command: str, arguments: Sequence[str] = ()) -> None:
    """Print the usage of a command of ``SCHEMAS``, and each key as ``entry`` does.

    Args:
        arguments: the other arguments of the command; ``--config-name`` may change defaults.
    """
    options = ""
    if command == "plan":
        options = "[--json] [--keys] [--elsewhere] [--memory GIB] [--times RUN] [sft] "
    print(f"usage: tandem {command} {options}[RECIPE.yaml] key=value ...")
    names = (argument.removeprefix("--config-name=") for argument in arguments)
    changed = {key: value for name in names for key, value in VERL_DEFAULTS.get(name, {}).items()}
    for key in keys_of(SCHEMAS[command]).values():
        if not key.ignored:
            print(entry(key, changed.get(key.name, key.default)))


def entry(key: Key, default: Any) -> str:
    """Return the lines about a key: its default, and indented what it does and when."""
    lines = [f"{key.name}={in_override_grammar(default)}"]
    lines += (textwrap.indent(textwrap.fill(text, WIDTH), "    ") for text in _facts(key))
    return "\n".join(lines)


def _facts(key: Key) -> Iterator[str]:
    yield key.description
    kind = f"one of {', '.join(key.choices)}" if key.choices else key.kind
    conditions = (f"{c.name}{c.operator}{'|'.join(c.values)}" for c in key.read_if)
    only = " and ".join(conditions)
    yield f"({kind}; read only with {only})" if only else f"({kind})"
