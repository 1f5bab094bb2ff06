# SPDX-License-Identifier: Apache-2.0
"""What a process imports from which others are forked, beyond what tandem's own processes need, and
where those look for more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping

PRELOADED = "TANDEM_TEST_PRELOADED"
"""The variable with the name of one more module; the tests of engines set it."""


def with_preloaded(names: Iterable[str]) -> list[str]:
    """Return the names of modules, and that of the variable behind them."""
    more = os.environ.get(PRELOADED)
    return [*names, more] if more else [*names]


def extend_path(environment: Mapping[str, str]) -> None:
    """Find modules below ``PYTHONPATH``, as a fresh interpreter would."""
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [folder for folder in folders if folder]
