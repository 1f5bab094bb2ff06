# SPDX-License-Identifier: Apache-2.0
"""The phase that a run is in at this moment, for the bar of a terminal.

The pipeline opens phases, and a sink asks for the one to show whenever it draws, on any thread.
Nothing is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The phases of a run. Of several at the same time, the first in this order is shown.

    The trainer's own phases come first, then those it may be waiting for.
    """

    SAVING = "saving"
    UPDATE_CRITIC = "update critic"
    UPDATE = "update"
    VALUES = "values"
    LOG_PROBS = "log-probs"
    WEIGHTS = "switching weights"
    REWARD_MODEL = "reward model"
    REFERENCE = "reference"
    GENERATING = "generating"
    REWARDS = "rewards"
    COLLECTING = "collecting"
    VALIDATING = "validating"


_ORDER = {phase: position for position, phase in enumerate(Phase)}


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """An open phase: ``done()`` of ``total`` parts are done."""

    phase: Phase
    total: int
    done: Callable[[], int]


class Activity:
    """The open phases of a run.

    Example:
        >>> activity = Activity()
        >>> with activity.during(Phase.UPDATE, total=2, done=lambda: 1):
        ...     activity.describe()
        'update 1/2'
    """

    def __init__(self) -> None:
        self._open: list[_Open] = []

    @contextmanager
    def during(
        self, phase: Phase, *, total: int = 1, done: Callable[[], int] = lambda: 0
    ) -> Iterator[None]:
        """Show a phase while the block runs, until all of its parts are done.

        Args:
            done: returns how many of ``total`` parts are done. Any thread may call it.
        """
        opened = _Open(phase, total, done)
        self._open.append(opened)
        try:
            yield
        finally:
            self._open.remove(opened)

    def describe(self) -> str:
        """Return the phase to show, with its parts if it has several; "" if none is open."""
        for opened in sorted(self._open, key=lambda opened: _ORDER[opened.phase]):
            done = opened.done()
            if done < opened.total:
                counts = f" {max(done, 0)}/{opened.total}" if opened.total > 1 else ""
                return opened.phase.value + counts
        return ""
