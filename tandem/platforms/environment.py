# SPDX-License-Identifier: Apache-2.0
"""Environment variables of other packages, which read them when they are imported or started."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping


def set_defaults(values: Mapping[str, str]) -> None:
    """Set the variables that are not set, for this process and its children."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def inherited(*, without: Collection[str]) -> dict[str, str]:
    """Return the variables of this process for a child, except those in ``without``."""
    return {name: value for name, value in os.environ.items() if name not in without}
