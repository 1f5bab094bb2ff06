# SPDX-License-Identifier: Apache-2.0
"""A function run by several threads as if they were processes: they share a store and nothing else
that they are not given."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch._C._distributed_c10d import HashStore, Store


def run_threads(function: Callable[[int, Store], Any], size: int) -> list[Any]:
    """What ``function(rank, store)`` returned, or the exception that it raised, by rank."""
    store = HashStore()

    def call(rank: int) -> Any:
        try:
            return function(rank, store)
        except Exception as error:  # the test looks at it
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(call, range(size)))
