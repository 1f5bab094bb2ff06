# SPDX-License-Identifier: Apache-2.0
"""The lock step of processes that generate with divided experts.

Each process has sequences of its own, and all of them have to take part in each pass of any of
them, because its tokens need the experts of all. Before a pass they agree whether one takes place.
A process without a pass of its own then computes its experts for the tokens of the others. All of
them end a round with the same agreement, so that none waits for one that has left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import distributed

from tandem.models.parallel import Peers

_MUST, _MAY, _STOPS = range(3)


class LockStep:
    """The part of one process. All peers call ``leave`` at the end of each round of passes.

    Args:
        attend: takes part in a pass of the peers without a token of its own; an engine may set it.
    """

    def __init__(self, peers: Peers, attend: Callable[[], None]) -> None:
        self._peers = peers
        self.attend = attend
        self._owes_pass = False
        self._is_over = False
        self.num_attended = 0

    def begin_pass(self) -> None:
        """Announce a pass that takes place in any case. The caller computes it next."""
        if not self._owes_pass:
            self._agree(_MUST)
        self._owes_pass = False

    def may_step(self) -> bool:
        """Ask whether the peers go on. If they do, a pass follows, else ``leave``."""
        return self._owes_pass or self._agree(_MAY)

    def leave(self, *, stops: bool) -> None:
        """Take part in the passes of the peers until the round is over.

        Args:
            stops: whether the peers should end the round as well, rather than go on.
        """
        while self._owes_pass or (not self._is_over and self._agree(_STOPS if stops else None)):
            self._owes_pass = False
            self.num_attended += 1
            self.attend()
        self._is_over = False

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Return the largest of the peers' numbers, for each of some numbers."""
        found = torch.tensor(numbers, dtype=torch.int64)
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._peers.group)
        return found.tolist()

    def totals(self, number: int) -> list[int]:
        """Return the numbers of all peers, in their order."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self._peers.size)]
        distributed.all_gather(found, torch.tensor([number]), group=self._peers.group)
        return [int(one) for one in found]

    def _agree(self, wish: int | None) -> bool:
        """Return whether a pass takes place: one must, or one may and none stops."""
        wishes = torch.zeros(3, dtype=torch.int64)
        if wish is not None:
            wishes[wish] = 1
        distributed.all_reduce(wishes, group=self._peers.group)
        must, may, stops = wishes.tolist()
        self._owes_pass = must > 0 or (may > 0 and stops == 0)
        self._is_over = not self._owes_pass
        return self._owes_pass
