# SPDX-License-Identifier: Apache-2.0
"""The exactly-once ledger of the training data, and the source that draws entries from it.

Draws are numbered by uid from 0. The row of a uid is a pure function of (uid, seed, epoch size).
The state is therefore a cursor and the set of open uids, for a data set of any size. A uid that was
trained or dropped is never drawn again. After a restore, the open uids are drawn again first, in
order and with the same rows.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from tandem.config.schema.data import DataConfig
from tandem.config.schema.sft import SftDataConfig
from tandem.data.threads import in_threads
from tandem.errors import UserError

STATE_FORMAT = 1
Drawn_co = TypeVar("Drawn_co", covariant=True)


class Draw(NamedTuple):
    """A draw: its number within the run, and the index of the row drawn."""

    uid: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOrder:
    """The settings that decide the row of each uid. A resumed run must have the same.

    Attributes:
        num_rows: the number of rows that can be drawn, after filtering.
        batch_size: the number of rows per training step; an epoch is a whole number of batches.
        shuffle: whether each epoch has its own permutation; else rows keep the order of the files.
        seed: the seed of the permutations.
        fingerprint: the hash of the rows' contents, see ``fingerprint``.
    """

    num_rows: int
    batch_size: int
    shuffle: bool
    seed: int
    fingerprint: str

    @property
    def epoch_size(self) -> int:
        """The number of draws per epoch: ``num_rows // batch_size * batch_size``."""
        return self.num_rows // self.batch_size * self.batch_size


def permutation(num_rows: int, *, seed: int, epoch: int) -> np.ndarray:
    """Return the order of the rows in one epoch, int64 (num_rows,).

    It is the same on every machine and with every version of numpy, which freezes the streams of
    RandomState.
    """
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    return np.random.RandomState(bits).permutation(num_rows)


def fingerprint(contents: Iterable[bytes]) -> str:
    """Return a hash of the contents of the rows, in order."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


class Ledger:
    """The order of the draws, and the state of each.

    A draw is *open* (in flight) from ``draw`` until ``mark_trained`` or ``mark_dropped``. An epoch
    draws the first ``num_rows // batch_size * batch_size`` rows of its permutation and omits the
    rest (verl's ``drop_last``). One call of ``draw`` may cross the end of an epoch.

    Example:
        >>> order = LedgerOrder(num_rows=7, batch_size=3, shuffle=False, seed=0, fingerprint="")
        >>> ledger = Ledger(order, total_epochs=1)
        >>> [draw.row for draw in ledger.draw(4)], [draw.row for draw in ledger.draw(4)]
        ([0, 1, 2, 3], [4, 5])
    """

    def __init__(self, order: LedgerOrder, *, total_epochs: int) -> None:
        """Create a ledger at its first draw. Raise UserError if the rows do not fill a batch."""
        if order.epoch_size == 0:
            raise UserError(
                "data.train_batch_size",
                order.batch_size,
                rule=f"must not exceed the number of rows ({order.num_rows} after filtering)",
                remedy="Lower it or add data.",
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
    def num_rows(self) -> int:
        """The number of rows that can be drawn."""
        return self._order.num_rows

    @property
    def epoch(self) -> int:
        """The epoch of the latest draw, from 0."""
        return max(0, self._next_uid - 1) // self._order.epoch_size

    @property
    def num_in_flight(self) -> int:
        """The number of open draws."""
        return len(self._open)

    @property
    def num_remaining(self) -> int:
        """The number of draws left, including those to repeat after a restore."""
        return len(self._again) + max(0, self._limit - self._next_uid)

    def draw(self, count: int) -> list[Draw]:
        """Open the next ``count`` draws, or fewer at the end of ``total_epochs``."""
        uids: list[int] = []
        while len(uids) < count and self.num_remaining > 0:
            uids.append(self._take_uid())
        self._open.update(uids)
        return [Draw(uid, self._row(uid)) for uid in uids]

    def mark_trained(self, uids: Iterable[int]) -> None:
        """Close draws that were trained on. Raise ValueError for a draw that is not open."""
        self._num_trained += self._close(uids)

    def mark_dropped(self, uids: Iterable[int]) -> None:
        """Close draws that are not to be trained on. Raise ValueError for one that is not open."""
        self._num_dropped += self._close(uids)

    def state(self) -> dict[str, Any]:
        """Return the state as a dict for JSON."""
        return {
            "format": STATE_FORMAT,
            "order": asdict(self._order),
            "next_uid": self._next_uid,
            "open": sorted(self._open.union(self._again)),
            "trained": self._num_trained,
            "dropped": self._num_dropped,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Replace the state by ``state()`` of an earlier process.

        Raises:
            UserError: the state is not one of a ledger, or belongs to other data or another order.
                The number of epochs may differ.
        """
        if isinstance(state, Mapping) and state.get("format", STATE_FORMAT) != STATE_FORMAT:
            raise UserError(
                "trainer.resume_mode",
                rule=f"the checkpoint's data state has format {state['format']}, but this version "
                f"reads {STATE_FORMAT}",
                remedy="Set trainer.resume_mode=disable to start from scratch.",
            )
        _check_shape(state)
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
            if len(self._epoch_orders) > 1:  # one call of draw rarely spans more than two epochs
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


def _check_shape(state: Any) -> None:
    """Raise UserError unless ``state`` has the keys and the types of ``Ledger.state()``."""
    try:
        counts = [state[name] for name in ("next_uid", "trained", "dropped")]
        uids = list(state["open"])
        has_order = {field.name for field in fields(LedgerOrder)} <= set(state["order"])
        is_ours = "format" in state and has_order and len(set(uids)) == len(uids)
        is_ours &= all(type(number) is int and number >= 0 for number in [*counts, *uids])
        is_ours = is_ours and all(uid < counts[0] for uid in uids)
    except (TypeError, LookupError):
        is_ours = False
    if not is_ours:
        raise UserError(
            "trainer.resume_mode",
            rule="the data state in the checkpoint's pipeline.json is not one that tandem wrote",
            remedy="Resume from another checkpoint, or set trainer.resume_mode=disable.",
        )


def _check_order(ours: LedgerOrder, saved: Mapping[str, Any]) -> None:
    """Raise UserError unless every uid has the same row as in the checkpoint."""
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
                key,
                rule=f"{name.replace('_', ' ')} is {value!r} but the checkpoint was made with "
                f"{saved[name]!r}, and its place in the data holds for that only",
                remedy="Set it back. Or set trainer.resume_mode=disable, which starts from "
                "scratch; for the weights of the checkpoint, also set the path of the model to its "
                "folder actor.",
            )


class Content(Protocol):
    """A row whose content is known."""

    @property
    def content(self) -> bytes:
        """The bytes to hash for the fingerprint of the data."""
        ...


class Entry(Content, Protocol[Drawn_co]):
    """An entry of a data set that can be drawn in each epoch."""

    @property
    def row(self) -> int:
        """The number of its row, counted over all files."""
        ...

    @property
    def pictures(self) -> Sequence[Any]:
        """The pictures that ``as_draw`` decodes."""
        ...

    def as_draw(self, uid: int) -> Drawn_co:
        """Return the value that the run processes as draw ``uid``."""
        ...


class Source(Generic[Drawn_co]):
    """The entries of a data set in the order of its ledger.

    ``Ledger`` documents the methods that both have. The state of a source is the state of its
    ledger; the entries are read again at each start.

    Example:
        >>> prompts = source.draw(128)
        >>> source.mark_trained([prompt.uid for prompt in prompts])
    """

    def __init__(
        self, read: Callable[[Sequence[int]], Sequence[Entry[Drawn_co]]], ledger: Ledger
    ) -> None:
        """Create a source.

        Args:
            read: returns the entries of rows by their index, in this order.
        """
        self._read = read
        self._ledger = ledger

    def __len__(self) -> int:
        return self._ledger.num_rows

    @property
    def epoch(self) -> int:
        """The epoch of the latest draw, from 0."""
        return self._ledger.epoch

    @property
    def num_in_flight(self) -> int:
        """The number of open draws."""
        return self._ledger.num_in_flight

    def draw(self, count: int) -> list[Drawn_co]:
        """Draw the next ``count`` entries, or fewer at the end of the last epoch."""
        draws = self._ledger.draw(count)
        entries = self._read([draw.row for draw in draws])
        return _as_draws(entries, [draw.uid for draw in draws])

    def mark_trained(self, uids: Iterable[int]) -> None:
        """Close draws that were trained on. Raise ValueError for a draw that is not open."""
        self._ledger.mark_trained(uids)

    def mark_dropped(self, uids: Iterable[int]) -> None:
        """Close draws that are not to be trained on. Raise ValueError for one that is not open."""
        self._ledger.mark_dropped(uids)

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint as a dict for JSON."""
        return self._ledger.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after ``state``. Raise UserError if it belongs to other data."""
        self._ledger.restore(state)


def open_source(
    entries: Sequence[Entry[Drawn_co]], config: DataConfig | SftDataConfig, *, total_epochs: int
) -> Source[Drawn_co]:
    """Return a source at its beginning. Raise UserError if the entries do not fill one batch."""
    ledger = open_ledger(entries, config, total_epochs=total_epochs)
    return Source(lambda rows: [entries[row] for row in rows], ledger)


def open_ledger(
    rows: Sequence[Content], config: DataConfig | SftDataConfig, *, total_epochs: int
) -> Ledger:
    """Return a ledger at its first draw. Raise UserError if the rows do not fill one batch."""
    order = LedgerOrder(
        num_rows=len(rows),
        batch_size=config.train_batch_size,
        shuffle=config.shuffle,
        seed=config.seed,
        fingerprint=fingerprint(row.content for row in rows),
    )
    return Ledger(order, total_epochs=total_epochs)


def draw_by_row(entries: Sequence[Entry[Drawn_co]]) -> list[Drawn_co]:
    """Draw every entry once for a validation, with its row as uid."""
    return _as_draws(entries, [entry.row for entry in entries])


def _as_draws(entries: Sequence[Entry[Drawn_co]], uids: Sequence[int]) -> list[Drawn_co]:
    """Return entries as draws. Pictures are decoded several at once."""
    pairs = list(zip(entries, uids, strict=True))
    if any(entry.pictures for entry in entries):
        return in_threads(lambda pair: pair[0].as_draw(pair[1]), pairs)
    return [entry.as_draw(uid) for entry, uid in pairs]
