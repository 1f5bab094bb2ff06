# SPDX-License-Identifier: Apache-2.0
"""The ``--help`` of a command that takes keys: it lists every key that has an effect.

It reads only the schemas: help appears at once and needs no torch.
"""

from __future__ import annotations

import textwrap

from pydantic import BaseModel

from tandem.config.parse.condition import in_override_grammar
from tandem.config.parse.keys import keys_of
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig

WIDTH = 92
SCHEMAS: dict[str, type[BaseModel]] = {"train": RunConfig, "plan": RunConfig, "sft": SftConfig}
"""The commands that take keys."""


def print_help(command: str) -> None:
    """Print the usage of a command of ``SCHEMAS``, and each key: name, default, description."""
    options = "[--json] [--keys] [--times RUN] " if command == "plan" else ""
    print(f"usage: tandem {command} {options}[RECIPE.yaml] key=value ...")
    for key in keys_of(SCHEMAS[command]).values():
        if not key.ignored:
            print(f"{key.name}={in_override_grammar(key.default)}")
            print(textwrap.indent(textwrap.fill(key.description, WIDTH), "    "))
