# SPDX-License-Identifier: Apache-2.0
"""Drawing from a data set through its ledger."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tandem.data.ledger import Ledger, LedgerOrder
from tandem.data.source import Source


@dataclass(frozen=True)
class Word:
    text: str

    def as_draw(self, uid: int) -> str:
        return f"{uid}:{self.text}"


def new_source() -> Source[str]:
    order = LedgerOrder(num_rows=3, batch_size=3, shuffle=False, seed=0, fingerprint="")
    return Source([Word("a"), Word("b"), Word("c")], Ledger(order, total_epochs=2))


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
