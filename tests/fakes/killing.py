# SPDX-License-Identifier: Apache-2.0
"""Kills of processes that start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tandem.children import process as module


@contextmanager
def next_children_killed(number: int) -> Iterator[None]:
    """Kill the next child processes of rewards or tools as soon as they exist."""
    start_interpreter, left = module.start_interpreter, iter(range(number))

    def start(*arguments: Any, **keys: Any) -> Any:
        channel, lifeline_fd, process = start_interpreter(*arguments, **keys)
        if next(left, None) is not None:
            process.kill()
        return channel, lifeline_fd, process

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "start_interpreter", start)
        yield
