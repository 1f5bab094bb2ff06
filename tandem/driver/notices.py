# SPDX-License-Identifier: Apache-2.0
"""The messages that a command prints before it starts: warnings and keys without effect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TextIO

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.overrides import LoadedConfig


def configure_logging() -> None:
    """Log to stderr, one line per message: this package from INFO on, others from WARNING on."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("tandem").setLevel(logging.INFO)


def print_notices(
    loaded: LoadedConfig[Any], stream: TextIO, *, warnings: Sequence[str] = ()
) -> None:
    """Print a line per warning and per key without effect: nothing is silently ignored."""
    for warning in (*loaded.warnings, *warnings):
        stream.write(f"warning: {warning}\n")
    for key, reason in ignored_keys(loaded).items():
        stream.write(f"without effect: {key}: {reason}\n")
