# SPDX-License-Identifier: Apache-2.0
"""The order of the queue of an engine: further turns of samples stand before new prompts.

They are older than prompts that have not begun, and what their environments hold waits for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TypeVar

T = TypeVar("T")


def put_behind_older(queue: deque[T], items: Sequence[T], *, is_older: Callable[[T], bool]) -> None:
    """Insert items behind the first items of the queue that are older than any new prompt."""
    place = sum(1 for _ in takewhile(is_older, queue))
    for offset, item in enumerate(items):
        queue.insert(place + offset, item)
