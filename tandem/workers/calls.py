# SPDX-License-Identifier: Apache-2.0
"""Calls of one method on all workers of pools.

Several threads may call the workers of one pool: all its ranks receive the calls in the same order,
because ranks that enter two collectives in different orders deadlock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from tandem.api import WorkerGroup, WorkerLost

SUBMITTING = threading.Lock()
"""Held while a call is submitted to all ranks of a pool."""


def submit_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Start the same call on every worker of some groups."""
    with SUBMITTING:
        return [group.submit(rank, method, *args) for group in groups for rank in range(group.size)]


def call_each(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Call a method of every worker of some groups. Return the results by group and rank."""
    return groups[0].gather(submit_each(groups, method, *args))


def call_at_start(groups: Sequence[WorkerGroup], method: str, /, *args: Any) -> list[Any]:
    """Do what ``call_each`` does before the first version of weights has come.

    A worker is replaced from then on. One that ends before raises its failure.
    """
    try:
        return call_each(groups, method, *args)
    except WorkerLost as lost:
        raise lost.failure from lost
