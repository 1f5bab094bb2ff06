# SPDX-License-Identifier: Apache-2.0
"""The messages before a run starts: warnings and keys without effect."""

from __future__ import annotations

import logging
from typing import Any, TextIO

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.keys import in_override_grammar
from tandem.config.parse.overrides import LoadedConfig


def configure_logging() -> None:
    """Log to stderr, one line per message: this package from INFO on, others from WARNING on."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("tandem").setLevel(logging.INFO)


def print_notices(loaded: LoadedConfig[Any], stream: TextIO) -> None:
    """Print the notices, a line each."""
    for notice in notices(loaded):
        stream.write(f"{notice}\n")


def notices(loaded: LoadedConfig[Any]) -> list[str]:
    """Return the defaults of verl that are in use, and a line per warning and per key without
    effect: nothing is silently ignored.
    """
    defaults = [f"{key}={in_override_grammar(v)}" for key, v in loaded.verl_defaults.items()]
    return [
        *([f"defaults of verl: {' '.join(defaults)}"] if defaults else []),
        *(f"warning: {warning}" for warning in loaded.warnings),
        *(f"without effect: {key}: {reason}" for key, reason in ignored_keys(loaded).items()),
    ]
