# SPDX-License-Identifier: Apache-2.0
"""The ledger: each draw trained once, whatever happens in between."""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from tandem.data.ledger import Ledger, LedgerOrder, Source, fingerprint, permutation
from tandem.errors import UserError

ORDER = LedgerOrder(num_rows=23, batch_size=5, shuffle=True, seed=7, fingerprint="f")


def saved(ledger: Ledger) -> dict[str, Any]:
    """The state as it comes back from a file."""
    return json.loads(json.dumps(ledger.state()))


def resumed(ledger: Ledger, *, total_epochs: int) -> Ledger:
    """A new process that continues from ``ledger``'s state."""
    fresh = Ledger(ORDER, total_epochs=total_epochs)
    fresh.restore(saved(ledger))
    return fresh


def draw_all(ledger: Ledger, count: int) -> list[tuple[int, int]]:
    drawn: list[tuple[int, int]] = []
    while draws := ledger.draw(count):
        drawn += draws
        ledger.mark_trained([draw.uid for draw in draws])
    return drawn


def test_an_epoch_is_a_whole_number_of_batches() -> None:
    gsm8k = replace(ORDER, num_rows=7473, batch_size=128)
    ledger = Ledger(gsm8k, total_epochs=1)
    steps = 0
    while draws := ledger.draw(128):
        steps += 1
        assert len(draws) == 128
        assert ledger.epoch == 0
    assert steps == 58
    assert ledger.num_remaining == 0


def test_each_epoch_is_a_permutation_of_its_own() -> None:
    drawn = draw_all(Ledger(ORDER, total_epochs=3), 5)
    assert [uid for uid, _ in drawn] == list(range(60))
    epochs = [[row for _, row in drawn[start : start + 20]] for start in (0, 20, 40)]
    for epoch in epochs:
        assert len(set(epoch)) == 20
        assert set(epoch) < set(range(23))
    for one, other in pairwise(epochs):
        assert one != other
        assert set(one) != set(other)  # the rest that is left out differs too


def test_the_order_does_not_depend_on_how_it_is_drawn() -> None:
    one = draw_all(Ledger(ORDER, total_epochs=2), 5)
    other = draw_all(Ledger(ORDER, total_epochs=2), 7)
    assert one == other


def test_the_order_depends_on_the_seed_and_without_shuffling_is_that_of_the_files() -> None:
    plain = draw_all(Ledger(replace(ORDER, shuffle=False), total_epochs=2), 5)
    assert [row for _, row in plain] == [*range(20), *range(20)]
    reseeded = draw_all(Ledger(replace(ORDER, seed=8), total_epochs=2), 5)
    assert reseeded != draw_all(Ledger(ORDER, total_epochs=2), 5)


def test_permutations_stay_what_they_were() -> None:
    """Checkpoints rely on it: a change here silently reorders the data of resumed runs."""
    assert permutation(10, seed=1, epoch=0).tolist() == [1, 0, 9, 8, 6, 3, 7, 4, 2, 5]
    assert permutation(10, seed=1, epoch=1).tolist() == [9, 2, 8, 0, 7, 3, 1, 5, 4, 6]


def test_the_last_draw_returns_what_is_left() -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    assert [len(ledger.draw(8)) for _ in range(4)] == [8, 8, 4, 0]


def test_a_draw_may_reach_into_the_next_epoch() -> None:
    ledger = Ledger(ORDER, total_epochs=2)
    ledger.draw(18)
    draws = ledger.draw(4)
    first = permutation(23, seed=7, epoch=0)[18:20].tolist()
    second = permutation(23, seed=7, epoch=1)[:2].tolist()
    assert [draw.row for draw in draws] == first + second
    assert ledger.epoch == 1


def test_open_draws_come_again_first_in_order_and_with_their_rows() -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    draws = ledger.draw(10)
    ledger.mark_trained([1, 2, 7])
    ledger.mark_dropped([0, 9])
    again = resumed(ledger, total_epochs=1)
    assert again.num_in_flight == 0
    redrawn = again.draw(7)
    assert redrawn[:5] == [draws[uid] for uid in (3, 4, 5, 6, 8)]
    assert [draw.uid for draw in redrawn[5:]] == [10, 11]
    state = again.state()
    assert (state["trained"], state["dropped"], again.num_in_flight) == (3, 2, 7)


def test_a_state_before_everything_is_redrawn_keeps_the_rest() -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    ledger.draw(6)
    once = resumed(ledger, total_epochs=1)
    once.draw(2)
    twice = resumed(once, total_epochs=1)
    assert [draw.uid for draw in twice.draw(7)] == [0, 1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("seed", range(5))
def test_every_draw_is_finished_once_whatever_is_killed(seed: int) -> None:
    """Draws, training, drops, checkpoints and kills in random order; work since the last
    checkpoint is lost with the process."""
    chance = random.Random(seed)
    expected = dict(draw_all(Ledger(ORDER, total_epochs=3), 5))
    ledger = Ledger(ORDER, total_epochs=3)
    open_draws: dict[int, int] = {}
    finished: list[tuple[int, int]] = []
    checkpoint, kept = saved(ledger), 0
    while ledger.num_remaining or open_draws:
        action = chance.choice(["draw", "draw", "train", "train", "drop", "save", "kill"])
        if action == "draw":
            open_draws.update(ledger.draw(chance.randint(1, 6)))
        elif action in ("train", "drop") and open_draws:
            uids = chance.sample(sorted(open_draws), chance.randint(1, len(open_draws)))
            (ledger.mark_trained if action == "train" else ledger.mark_dropped)(uids)
            finished += [(uid, open_draws.pop(uid)) for uid in uids]
        elif action == "save":
            checkpoint, kept = saved(ledger), len(finished)
        elif action == "kill":
            ledger = Ledger(ORDER, total_epochs=3)
            ledger.restore(checkpoint)
            open_draws.clear()
            del finished[kept:]
    assert dict(finished) == expected
    assert max(Counter(uid for uid, _ in finished).values()) == 1
    assert ledger.state()["trained"] + ledger.state()["dropped"] == 60


def test_the_state_does_not_grow_with_the_data() -> None:
    order = LedgerOrder(num_rows=100_000, batch_size=100, shuffle=True, seed=0, fingerprint="")
    ledger = Ledger(order, total_epochs=1)
    for _ in range(500):
        ledger.mark_trained([draw.uid for draw in ledger.draw(100)])
    ledger.draw(3)
    assert ledger.state()["open"] == [50_000, 50_001, 50_002]
    assert len(json.dumps(ledger.state())) < 400


@pytest.mark.parametrize("uids", [[5], [1, 1]])
def test_a_draw_that_is_not_open_cannot_be_closed(uids: list[int]) -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    ledger.draw(5)
    with pytest.raises(ValueError, match="not open, or were closed twice"):
        ledger.mark_trained(uids)
    assert ledger.num_in_flight == 5


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"num_rows": 24}, "data.train_files"),
        ({"fingerprint": "g"}, "data.train_files"),
        ({"batch_size": 4}, "data.train_batch_size"),
        ({"seed": 8}, "data.seed"),
        ({"shuffle": False}, "data.shuffle"),
    ],
)
def test_a_state_of_other_data_or_order_is_refused(change: dict[str, Any], key: str) -> None:
    state = saved(Ledger(ORDER, total_epochs=1))
    with pytest.raises(
        UserError,
        match=f"^{key}: .*the checkpoint was made with .*the path of the model to its folder actor",
    ):
        Ledger(replace(ORDER, **change), total_epochs=1).restore(state)


def test_more_epochs_continue_a_finished_run() -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    draw_all(ledger, 5)
    assert [draw.uid for draw in resumed(ledger, total_epochs=2).draw(2)] == [20, 21]


def test_a_state_of_another_format_is_refused() -> None:
    state = saved(Ledger(ORDER, total_epochs=1)) | {"format": 99}
    with pytest.raises(UserError, match="has format 99"):
        Ledger(ORDER, total_epochs=1).restore(state)


def test_too_few_rows_for_one_batch_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^data\.train_batch_size=24: must not exceed .*\(23 "):
        Ledger(replace(ORDER, batch_size=24), total_epochs=1)


def test_the_fingerprint_sees_order_and_boundaries() -> None:
    prints = {fingerprint(c) for c in ([b"ab", b"c"], [b"a", b"bc"], [b"c", b"ab"], [b"abc"])}
    assert len(prints) == 4


@dataclass(frozen=True)
class Word:
    row: int
    text: str
    content = b""
    pictures = ()

    def as_draw(self, uid: int) -> str:
        return f"{uid}:{self.text}"


def new_source() -> Source[str]:
    order = LedgerOrder(num_rows=3, batch_size=3, shuffle=False, seed=0, fingerprint="")
    words = [Word(0, "a"), Word(1, "b"), Word(2, "c")]
    return Source(lambda rows: [words[row] for row in rows], Ledger(order, total_epochs=2))


def test_draws_carry_their_uid_over_the_epochs() -> None:
    source = new_source()
    assert len(source) == 3
    assert source.draw(3) == ["0:a", "1:b", "2:c"]
    assert source.epoch == 0
    assert source.draw(9) == ["3:a", "4:b", "5:c"]
    assert source.epoch == 1
    assert source.draw(1) == []


def test_what_was_not_finished_comes_again() -> None:
    source, again = new_source(), new_source()
    source.draw(4)
    source.mark_trained([0, 2])
    source.mark_dropped([3])
    again.restore(source.state())
    assert again.draw(2) == ["1:b", "4:b"]
    with pytest.raises(ValueError, match="not open"):
        again.mark_trained([0])


@pytest.mark.parametrize(
    "change",
    [
        {"order": {}},
        {"order": None},
        {"open": [0, 0]},
        {"open": [99]},
        {"open": 3},
        {"next_uid": -1},
        {"next_uid": "5"},
        {"trained": None},
    ],
)
def test_a_state_of_another_shape_is_refused(change: dict[str, Any]) -> None:
    ledger = Ledger(ORDER, total_epochs=1)
    ledger.draw(5)
    with pytest.raises(UserError, match="not one that tandem wrote"):
        Ledger(ORDER, total_epochs=1).restore({**saved(ledger), **change})


@pytest.mark.parametrize("state", [None, [], {}, 3])
def test_a_state_that_is_no_ledger_is_refused(state: Any) -> None:
    with pytest.raises(UserError, match="not one that tandem wrote"):
        Ledger(ORDER, total_epochs=1).restore(state)
