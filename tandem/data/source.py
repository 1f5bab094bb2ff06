# SPDX-License-Identifier: Apache-2.0
"""What training draws from: the entries of a data set in the order of its ledger.

The same class serves prompts (``PromptSource``) and supervised examples (``SftSource``).
Its state is the ledger's; the entries are read anew at each start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from tandem.data.ledger import Ledger

Drawn_co = TypeVar("Drawn_co", covariant=True)


class Entry(Protocol[Drawn_co]):
    """One entry of a data set, not yet drawn."""

    def as_draw(self, uid: int) -> Drawn_co:
        """The value that travels through the run as draw ``uid``."""
        ...


class Source(Generic[Drawn_co]):
    """Entries, and the ledger of their draws; see ``Ledger`` for the meaning of each method.

    Example:
        >>> prompts = source.draw(128)
        >>> source.mark_trained([prompt.uid for prompt in prompts])
    """

    def __init__(self, entries: Sequence[Entry[Drawn_co]], ledger: Ledger) -> None:
        self._entries = entries
        self._ledger = ledger

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def epoch(self) -> int:
        """Epoch of the latest draw, from 0."""
        return self._ledger.epoch

    def draw(self, count: int) -> list[Drawn_co]:
        """The next ``count`` entries; fewer when the epochs are used up, at last none."""
        return [self._entries[draw.row].as_draw(draw.uid) for draw in self._ledger.draw(count)]

    def mark_trained(self, uids: Iterable[int]) -> None:
        """These draws were trained on. Raises ValueError for a draw that is not open."""
        self._ledger.mark_trained(uids)

    def mark_dropped(self, uids: Iterable[int]) -> None:
        """These draws were given up. Raises ValueError for a draw that is not open."""
        self._ledger.mark_dropped(uids)

    def state(self) -> dict[str, Any]:
        """JSON-able; part of every checkpoint."""
        return self._ledger.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``. Raises UserError if it belongs to other data."""
        self._ledger.restore(state)
