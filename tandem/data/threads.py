# SPDX-License-Identifier: Apache-2.0
"""Several calls at once, for functions that release the interpreter's lock."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_MAX_THREADS = 8
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_threads(function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Return the results in the order of ``items``. The first error in this order is raised."""
    num_threads = min(_MAX_THREADS, os.cpu_count() or 1, len(items))
    if num_threads < 2:
        return [function(item) for item in items]
    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(function, items))
