# SPDX-License-Identifier: Apache-2.0
"""The states of samples that wait for another turn, beside the cache of the running rows.

A turn that ends leaves its keys and values here, and the next turn computes only the tokens that
were not there yet. The shelf gives way to running rows: the sample that has waited longest goes
first, and is computed from its first token when its turn comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.rollout.native.cache import TokenStates
from tandem.rollout.native.scheduler import Admission
from tandem.types import TokenIds


@dataclass(frozen=True, slots=True)
class _Kept:
    token_ids: TokenIds
    states: TokenStates


class Shelf:
    """The kept states by sample, those that have waited longest first.

    Attributes:
        num_tokens: the number of tokens whose states are kept.
        num_reused: the number of tokens that were taken back so far and not computed again.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, _Kept] = OrderedDict()
        self.num_tokens = 0
        self.num_reused = 0

    def put(self, sample_id: int, token_ids: TokenIds, *, states: TokenStates) -> None:
        """Keep the states of the tokens of a sample."""
        self._drop(sample_id)
        self._kept[sample_id] = _Kept(token_ids, states)
        self.num_tokens += len(token_ids)

    def take(self, admission: Admission) -> dict[int, TokenStates]:
        """Return the states of new rows by the index of their prompt; they are kept no longer.

        A prompt that does not go on from the tokens of its sample has none.
        """
        found: dict[int, TokenStates] = {}
        first = 0
        for index, (prompt, count) in enumerate(
            zip(admission.prompts, admission.num_rows, strict=True)
        ):
            kept = self._drop(admission.rows[first].sample_id)
            first += count
            if kept is not None and _goes_on(prompt, kept.token_ids):
                found[index] = kept.states
                self.num_reused += len(kept.token_ids)
        return found

    def trim(self, max_tokens: int) -> None:
        """Give up states until at most ``max_tokens`` tokens are kept."""
        while self._kept and self.num_tokens > max_tokens:
            self._drop(next(iter(self._kept)))

    def forget(self, sample_ids: Iterable[int]) -> None:
        """Give up the states of samples that get no further turn."""
        for sample_id in sample_ids:
            self._drop(sample_id)

    def clear(self) -> None:
        """Give up all states."""
        self._kept.clear()
        self.num_tokens = 0

    def _drop(self, sample_id: int) -> _Kept | None:
        kept = self._kept.pop(sample_id, None)
        if kept is not None:
            self.num_tokens -= len(kept.token_ids)
        return kept


def _goes_on(prompt: TokenIds, token_ids: TokenIds) -> bool:
    return len(prompt) > len(token_ids) and tuple(prompt[: len(token_ids)]) == token_ids
