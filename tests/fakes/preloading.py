# SPDX-License-Identifier: Apache-2.0
"""What a process imports from which others are forked, beyond what tandem's own processes need."""

from __future__ import annotations

import os
from collections.abc import Iterable

PRELOADED = "TANDEM_TEST_PRELOADED"
"""The variable with the name of one more module; the tests of engines set it."""


def with_preloaded(names: Iterable[str]) -> list[str]:
    """Return the names of modules, and that of the variable behind them."""
    more = os.environ.get(PRELOADED)
    return [*names, more] if more else [*names]
