# SPDX-License-Identifier: Apache-2.0
"""Which row is drawn when, and what became of it: the exactly-once ledger of the training data.

Draws are numbered by uid from 0. The row of a uid is a pure function of (uid, seed, epoch size), so
that the whole state is a cursor and the set of open uids, however large the data set is.
Guarantees: a uid that was trained or dropped is never drawn again; a uid that was open when the
state was saved is drawn again, first, in order and with the same row. Not here: what a row holds
(see ``source``), and any tensor.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from tandem.errors import UserError

STATE_FORMAT = 1


class Draw(NamedTuple):
    """One draw: its number within the run, and the index of the row drawn."""

    uid: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOrder:
    """All that decides which row a uid stands for; a resumed run must agree on it.

    Attributes:
        num_rows: rows that can be drawn (after filtering).
        batch_size: rows per training step; an epoch is a whole number of these.
        shuffle: a new permutation each epoch, or the order of the files.
        seed: of the permutations.
        fingerprint: of the rows' contents, see ``fingerprint``.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    fingerprint: str

    @property
    def epoch_size(self) -> int:
        """Draws per epoch: ``num_rows // batch_size * batch_size``."""
        return self.num_rows // self.batch_size * self.batch_size


def permutation(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """Order of the rows in one epoch, int64 (num_rows,): the same on every machine and with every
    numpy, which keeps the streams of RandomState frozen."""
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(num_rows)


def fingerprint(contents: Iterable[bytes]) -> str:
    """Hash of what the rows hold, in order."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class Ledger:
    """A draw is *open* (in flight) from ``draw`` until ``mark_trained`` or ``mark_dropped``.

    An epoch serves the first ``num_rows // batch_size * batch_size`` rows of its permutation and
    leaves the rest out (verl's drop_last); which ones differs from epoch to epoch. That is a rule
    about the epoch and not about a draw: dynamic sampling may draw any number at a time, and a draw
    may reach into the next epoch. After ``total_epochs`` a draw returns fewer rows than asked for,
    at last none.

    Example:
        >>> order = LedgerOrder(num_rows=7, batch_size=3, shuffle=False, seed=0, fingerprint="")
        >>> ledger = Ledger(order, total_epochs=1)
        >>> [draw.row for draw in ledger.draw(4)], [draw.row for draw in ledger.draw(4)]
        ([0, 1, 2, 3], [4, 5])
    """

    def __init__(self, order: LedgerOrder, *, total_epochs: int) -> None:
        """Raises UserError if the rows do not fill one batch."""
        if order.epoch_size == 0:
            raise UserError(
                f"data.train_batch_size={order.batch_size}: must not exceed the number of rows "
                f"({order.num_rows} after filtering). Lower it or add data."
            )
        self._order = order
        self._limit = order.epoch_size * total_epochs
        self._next_uid = 0
        self._again: deque[int] = deque()
        self._open: set[int] = set()
        self._num_trained = 0
        self._num_dropped = 0
        self._epoch_orders: dict[int, np.ndarray] = {}

    @property
    def epoch(self) -> int:
        """Epoch of the latest draw, from 0."""
        return max(0, self._next_uid - 1) // self._order.epoch_size

    @property
    def num_in_flight(self) -> int:
        """Draws that are open."""
        return len(self._open)

    @property
    def num_remaining(self) -> int:
        """How many draws are still to come."""
        return len(self._again) + max(0, self._limit - self._next_uid)

    def draw(self, count: int) -> list[Draw]:
        """Open the next ``count`` draws; fewer when the epochs are used up."""
        uids: list[int] = []
        while len(uids) < count and self.num_remaining > 0:
            uids.append(self._take_uid())
        self._open.update(uids)
        return [Draw(uid, self._row(uid)) for uid in uids]

    def mark_trained(self, uids: Iterable[int]) -> None:
        """Close draws that were trained on. Raises ValueError for a draw that is not open."""
        self._num_trained += self._close(uids)

    def mark_dropped(self, uids: Iterable[int]) -> None:
        """Close draws that were given up. Raises ValueError for a draw that is not open."""
        self._num_dropped += self._close(uids)

    def state(self) -> dict[str, Any]:
        """The ledger as a JSON-able dict, a few numbers besides the open uids."""
        return {
            "format": STATE_FORMAT,
            "order": asdict(self._order),
            "next_uid": self._next_uid,
            "open": sorted(self._open.union(self._again)),
            "trained": self._num_trained,
            "dropped": self._num_dropped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state()`` of an earlier process; own draws so far are forgotten.

        Raises:
            UserError: the state belongs to other data or another order (epochs may differ).
        """
        if state["format"] != STATE_FORMAT:
            raise UserError(
                f"trainer.resume_mode: the checkpoint's data state has format {state['format']}, "
                f"this version reads {STATE_FORMAT}. Set trainer.resume_mode=disable to start anew."
            )
        _check_order(self._order, state["order"])
        self._next_uid = state["next_uid"]
        self._again = deque(state["open"])
        self._open = set()
        self._num_trained = state["trained"]
        self._num_dropped = state["dropped"]

    def _take_uid(self) -> int:
        if self._again:
            return self._again.popleft()
        self._next_uid += 1
        return self._next_uid - 1

    def _row(self, uid: int) -> int:
        epoch, position = divmod(uid, self._order.epoch_size)
        return int(self._epoch_order(epoch)[position]) if self._order.shuffle else position

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch not in self._epoch_orders:
            if len(self._epoch_orders) > 1:  # a draw spans two epochs at most, unless data are tiny
                del self._epoch_orders[min(self._epoch_orders)]
            order = permutation(self._order.num_rows, seed=self._order.seed, epoch=epoch)
            self._epoch_orders[epoch] = order
        return self._epoch_orders[epoch]

    def _close(self, uids: Iterable[int]) -> int:
        closing = list(uids)
        stray = [uid for uid in closing if uid not in self._open]
        if stray or len(set(closing)) < len(closing):
            raise ValueError(f"draws {stray or closing} are not open, or were closed twice")
        self._open.difference_update(closing)
        return len(closing)


def _check_order(ours: LedgerOrder, saved: Mapping[str, Any]) -> None:
    """The settings that make a uid stand for a row must be those of the checkpoint."""
    rules = {
        "num_rows": "data.train_files",
        "fingerprint": "data.train_files",
        "batch_size": "data.train_batch_size",
        "shuffle": "data.shuffle",
        "seed": "data.seed",
    }
    for name, key in rules.items():
        value = getattr(ours, name)
        if value != saved[name]:
            raise UserError(
                f"{key}: {name.replace('_', ' ')} is {value!r} but the checkpoint was made with "
                f"{saved[name]!r}. Restore it, or set trainer.resume_mode=disable to start anew."
            )
