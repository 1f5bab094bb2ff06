# SPDX-License-Identifier: Apache-2.0
"""Timers of the named sections of a step.

Sections may overlap; repeated sections add up, and a section that raises counts, too. Nothing here
waits for an accelerator: a section measures how long the caller waited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """The seconds of sections since the last ``take``.

    Example:
        >>> timers = Timers(time.perf_counter)
        >>> with timers.section("step"), timers.section("gen"):
        ...     generate()
        >>> timing_metrics(timers.take(), num_prompt_tokens=96, num_response_tokens=32)
        {"timing_s/gen": 1.2, "timing_s/step": 1.2, "timing_per_token_ms/gen": 37.5}
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``name``."""
        begin = self._clock()
        try:
            yield
        finally:
            self.add(name, self._clock() - begin)

    def add(self, name: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to ``name``."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Return the seconds by section, and reset them."""
        taken, self._seconds = self._seconds, {}
        return taken
