# SPDX-License-Identifier: Apache-2.0
"""The replacement of workers that only generate: new processes, and a new weight link for all.

A lost worker ends the link in all its processes. The new worker is started at once, and takes part
from the next transfer on: all processes of the link then leave the old one and join one of the next
generation. The trainer holds its weights still meanwhile, as in any transfer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from tandem.api import WorkerGroup, WorkerLost
from tandem.workers.calls import call_each

logger = logging.getLogger(__name__)

KEY = "actor_rollout_ref.rollout.max_engine_restarts"


class Replacements:
    """The workers of a generating pool that were lost, and the generation of the weight link.

    Args:
        group: the pool that only generates.
        linked: all pools that send or receive weights.
        max_restarts: the number of workers that may be replaced in the run; 0 replaces none.

    Attributes:
        num_restarts: the number of workers that have been replaced.
    """

    def __init__(
        self, group: WorkerGroup, linked: Sequence[WorkerGroup], *, max_restarts: int
    ) -> None:
        self._group = group
        self._linked = linked
        self._max_restarts = max_restarts
        self._generation = 0
        self._starting: set[int] = set()
        self.num_restarts = 0

    @property
    def is_possible(self) -> bool:
        """Whether the configuration allows that workers are replaced."""
        return self._max_restarts > 0

    def start(self, lost: WorkerLost, *, num_unfinished: int) -> None:
        """Start a process in place of a lost worker, without waiting for it.

        Args:
            num_unfinished: the number of its samples that are generated again.

        Raises:
            Exception: the failure of the worker, if no restart is left.
        """
        if self.num_restarts == self._max_restarts:
            raise lost.failure
        self.num_restarts += 1
        logger.warning(
            "%s. Another process takes its place (%d of %s=%d), and its %d unfinished samples are "
            "generated again",
            str(lost.failure).partition("\n")[0],
            self.num_restarts,
            KEY,
            self._max_restarts,
            num_unfinished,
        )
        self._group.start_again(lost.rank)
        self._starting.add(lost.rank)

    def join(self) -> None:
        """Wait for new workers, and let all processes join a new weight link with them.

        Raises:
            WorkerLost: a worker that can be replaced has ended meanwhile.
        """
        if not self._starting:
            return
        for rank in self._starting:
            self._group.until_started(rank)
        self._generation += 1
        call_each(self._linked, "join_link", self._generation)

    def transfer(self, version: int) -> None:
        """Send the trainer's weights to all processes of the link, and put them into use.

        Raises:
            WorkerLost: a worker that can be replaced has ended meanwhile; ``start`` and
                ``transfer`` come next.
        """
        self.join()
        call_each(self._linked, "transfer", version)
        call_each(self._linked, "swap", version)
        self._starting.clear()
