# SPDX-License-Identifier: Apache-2.0
"""The first steps of environments and agents of a run: whether any of them works.

A run whose tools or agents are all broken ends soon, with the cause. One where only the quickest
fail goes on: the run ends only if nothing that was under way beside them works either. Later
failures are counted elsewhere (``failures``).
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from itertools import islice

from tandem.errors import RunFailure

MAX_FIRST_FAILURES = 8
"""After so many failures and no success, the run waits only for attempts that run at that time."""


class FirstAttempts:
    """The attempts of a run until one of them works.

    Once ``MAX_FIRST_FAILURES`` have failed and none has worked, those that are under way then are
    waited for. If they fail too, the run ends. Attempts that wait for a place are not under way.

    Example:
        >>> attempts = FirstAttempts()
        >>> with attempts.begin() as conclude:
        ...     conclude(await step())  # the cause of a failure; "" if it has worked
    """

    def __init__(self) -> None:
        self._has_worked = False
        self._num_failures = 0
        self._last_failure = ""
        self._lines: dict[str, dict[object, None]] = {}
        self._num_places: dict[str, int | None] = {}
        self._awaited: set[object] = set()

    @contextmanager
    def begin(
        self, line: str = "", *, num_places: int | None = None
    ) -> Generator[Callable[[str], None]]:
        """Begin an attempt; yield what concludes it, and is not called if it is given up.

        Args:
            line: the line in which attempts wait, in their order, for one of ``num_places``; with
                None, no attempt waits.

        Raises:
            RunFailure: by the conclusion, or where an attempt is given up: all have failed that the
                run was waiting for.
        """
        own = object()
        self._num_places[line] = num_places
        self._lines.setdefault(line, {})[own] = None

        def leave() -> None:
            self._lines[line].pop(own, None)
            self._awaited.discard(own)

        def conclude(failure: str) -> None:
            leave()
            self._count(failure)

        try:
            yield conclude
        except BaseException:
            leave()
            raise
        was_awaited = own in self._awaited
        leave()
        if was_awaited:
            self._judge()

    def _count(self, failure: str) -> None:
        self._has_worked = self._has_worked or not failure
        if self._has_worked:
            return
        self._num_failures += 1
        self._last_failure = failure
        if self._num_failures == MAX_FIRST_FAILURES:
            self._awaited = {
                attempt
                for name, line in self._lines.items()
                for attempt in islice(line, self._num_places[name])
            }
        self._judge()

    def _judge(self) -> None:
        if self._has_worked or self._num_failures < MAX_FIRST_FAILURES or self._awaited:
            return
        raise RunFailure(
            f"the first {self._num_failures} steps of environments and agents have failed; the "
            f"last: {self._last_failure}"
        )
