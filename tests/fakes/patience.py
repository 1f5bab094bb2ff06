# SPDX-License-Identifier: Apache-2.0
"""How long tests wait on a machine that may be slow or busy.

A test that claims "at once" says what the code under test must not wait for, and allows half of
that. Such limits are minutes long, so that no load makes the test fail; a correct program takes
milliseconds all the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

Found = TypeVar("Found")

LIMIT_S = 120.0
"""A time limit that a correct program never reaches, for whatever the test configures."""

PATIENCE_S = LIMIT_S / 2
"""The time that a test gives to an event that comes at once on an idle machine."""


@contextmanager
def sooner_than(limit_s: float = LIMIT_S) -> Generator[None, None, None]:
    """Assert that the block takes at most half of ``limit_s`` seconds, so does not wait for it."""
    begin_s = time.monotonic()
    yield
    assert time.monotonic() - begin_s < limit_s / 2


def until(find: Callable[[], Found]) -> Found:
    """Return the first result that is not empty."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := find()):
        assert time.monotonic() < deadline, "nothing happens"
        time.sleep(0.01)
    return found
