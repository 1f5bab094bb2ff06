# SPDX-License-Identifier: Apache-2.0
"""What a command says before it starts: warnings, and keys that were set without effect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, TextIO

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.overrides import LoadedConfig


def configure_logging() -> None:
    """Messages of this package from INFO on, one line each, on stderr; those of others from WARNING
    on.
    """
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("tandem").setLevel(logging.INFO)


def print_notices(
    loaded: LoadedConfig[Any], stream: TextIO, *, warnings: Sequence[str] = ()
) -> None:
    """One line a warning and a key without effect, so that nothing is silently ignored."""
    for warning in (*loaded.warnings, *warnings):
        stream.write(f"warning: {warning}\n")
    for key, reason in ignored_keys(loaded).items():
        stream.write(f"without effect: {key}: {reason}\n")
