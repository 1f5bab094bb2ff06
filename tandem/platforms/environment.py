# SPDX-License-Identifier: Apache-2.0
"""Environment variables of other packages, which read them when they are imported or started."""

from __future__ import annotations

import os
from collections.abc import Mapping


def set_defaults(values: Mapping[str, str]) -> None:
    """Set the variables that are not set, for this process and its children."""
    for name, value in values.items():
        os.environ.setdefault(name, value)
