# SPDX-License-Identifier: Apache-2.0
"""The pages of samples that wait for another turn. Integers only; no device.

A turn that ends leaves its pages here, and the next turn computes only the tokens that are not in
them. Parked pages give way to running rows: the sample that has waited longest goes first, and is
computed from its first token when its turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from tandem.rollout.paged.pages import PagePool
from tandem.types import TokenIds


@dataclass(frozen=True, slots=True)
class Parked:
    """The tokens of a sample whose keys are stored, their pages in order, how many of these it has
    in common with the other samples of its prompt, and the routes of its tokens, if those are
    recorded.
    """

    token_ids: TokenIds
    pages: tuple[int, ...]
    num_common_pages: int = 0
    routes_tLX: np.ndarray | None = None

    def begins(self, prompt: TokenIds) -> bool:
        """Return whether a prompt goes on from these tokens."""
        num_kept = len(self.token_ids)
        return len(prompt) > num_kept and tuple(prompt[:num_kept]) == self.token_ids


class Parking:
    """The parked pages by sample, those that have waited longest first.

    Args:
        pool: the pool that the pages are of; their owner is the sample.

    Attributes:
        num_evicted: the number of samples that have given way so far.
        num_reused: the number of tokens that were taken back so far and not computed again.
    """

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._parked: OrderedDict[int, Parked] = OrderedDict()
        self.num_evicted = 0
        self.num_reused = 0

    @property
    def num_pages(self) -> int:
        """The number of parked pages; one that several samples share counts for each."""
        return sum(len(parked.pages) for parked in self._parked.values())

    def __len__(self) -> int:
        return len(self._parked)

    def put(self, sample_id: int, parked: Parked) -> None:
        """Keep the pages of a sample, which it owns."""
        self.forget((sample_id,))
        self._parked[sample_id] = parked

    def find(self, sample_id: int, prompt: TokenIds) -> Parked | None:
        """Return what is parked of a sample, if its prompt goes on from that."""
        parked = self._parked.get(sample_id)
        return parked if parked is not None and parked.begins(prompt) else None

    def take(self, sample_id: int) -> Parked:
        """Return what is parked of a sample, whose row owns the pages from now on."""
        parked = self._parked.pop(sample_id)
        self.num_reused += len(parked.token_ids)
        return parked

    def give_way(self, num_free: int, *, but: int) -> None:
        """Release pages until the pool has at least ``num_free`` free ones, if it can have them.

        Args:
            but: the sample that keeps its pages.
        """
        while self._pool.num_free < num_free:
            oldest = next((one for one in self._parked if one != but), None)
            if oldest is None:
                return
            self.forget((oldest,))
            self.num_evicted += 1

    def forget(self, sample_ids: Iterable[int]) -> None:
        """Release the pages of samples that get no further turn."""
        for sample_id in sample_ids:
            parked = self._parked.pop(sample_id, None)
            if parked is not None:
                self._pool.release(parked.pages)

    def clear(self) -> None:
        """Release all pages."""
        self.forget(list(self._parked))
