# SPDX-License-Identifier: Apache-2.0
"""Log-probs that a device computes while vLLM prepares the next step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tandem.rollout.sampler import DrawRule, draw_rows
from tandem.rollout.vllm.draw import GREEDY, DrawnLogProbs, Rows, Stream


class _Event:
    """The event of a device that has computed what it is told it has."""

    made: list[_Event]

    def __init__(self, device: torch.device) -> None:
        self.has_happened = self.is_recorded = False
        self.made.append(self)

    def record(self) -> None:
        """Stand for what the device was told before."""
        assert _OfDevice.num_copies == len(self.made), "the copy belongs to it"
        self.is_recorded = True

    def query(self) -> bool:
        """Return whether it has happened, which an event that stands for nothing has."""
        return self.has_happened or not self.is_recorded


class _OfDevice:
    """Numbers of a device, whose copy to the host is complete when the event has happened."""

    device = torch.device("meta")
    num_copies = 0

    def __init__(self, *numbers: float) -> None:
        self._numbers = torch.tensor(numbers)

    def to(self, place: str, *, non_blocking: bool) -> torch.Tensor:
        """Return them on the host."""
        assert place == "cpu" and non_blocking
        _OfDevice.num_copies += 1
        return self._numbers


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[_Event]:
    _Event.made, _OfDevice.num_copies = [], 0
    monkeypatch.setattr(torch, "Event", _Event)
    return _Event.made


def test_log_probs_are_written_when_the_device_has_them(events: list[_Event]) -> None:
    drawn, one, other = DrawnLogProbs(), Stream(0, GREEDY), Stream(1, GREEDY)
    noted: list[Any] = [_OfDevice(-1.0, -2.0), _OfDevice(-3.0, -4.0)]
    drawn.note([one, other], [0, 0], logp_B=noted[0])
    drawn.note([one, other], [1, 1], logp_B=noted[1])
    events[1].has_happened = True
    drawn.read()
    assert one.log_probs == [], "they are written in the order in which they were drawn"
    events[0].has_happened = True
    drawn.read()
    assert one.log_probs == [-1.0, -3.0]
    assert other.log_probs == [-2.0, -4.0]


def test_a_token_that_is_drawn_again_replaces_the_first(events: list[_Event]) -> None:
    drawn, row = DrawnLogProbs(), Stream(0, GREEDY)
    noted: list[Any] = [_OfDevice(-1.0), _OfDevice(-2.0)]
    for log_probs in noted:
        drawn.note([row], [0], logp_B=log_probs)
        events[-1].has_happened = True
    drawn.read()
    assert row.log_probs == [-2.0]
    assert len(events) == 2


def test_on_a_cpu_they_are_there_at_once() -> None:
    drawn, row = DrawnLogProbs(), Stream(0, GREEDY)
    drawn.note([row], [0], logp_B=torch.tensor([-1.5]))
    assert row.log_probs == [-1.5]


@pytest.mark.parametrize("log_probs", [None, DrawnLogProbs()])
def test_a_row_goes_on_after_an_interruption(log_probs: DrawnLogProbs | None) -> None:
    """A server has a new stream then. In a run, the stream has the log-probs of earlier tokens."""
    row = Stream(0, GREEDY, log_probs=[] if log_probs is None else [-1.0, -2.0])
    rows = Rows(draw_rows, log_probs=log_probs)
    rows.add(0, row, token_ids=[5, 6])
    drawn_BV = rows.draw(torch.tensor([[0.0, 3.0, 1.0]]))
    assert int(drawn_BV.argmax()) == 1
    assert len(row.log_probs) == (0 if log_probs is None else 3)


def _tokens(rows: Rows, logits_BV: torch.Tensor) -> list[int]:
    return rows.draw(logits_BV.clone()).argmax(-1).tolist()


def _placed(places: dict[int, Stream]) -> Rows:
    """Rows that have never drawn before."""
    rows = Rows(draw_rows, log_probs=None)
    for index, stream in places.items():
        rows.add(index, stream, token_ids=stream.token_ids)
    return rows


def test_draws_follow_streams_that_come_move_and_leave() -> None:
    """Each batch draws as one that has never drawn, so that nothing of an earlier one is used."""
    generator = torch.Generator().manual_seed(0)
    logits_BV = torch.randn(3, 500, generator=generator)
    warm, greedy = DrawRule(1.0, -1, 1.0), GREEDY
    a, b, c = Stream(1, warm), Stream(2, greedy), Stream(3, warm)
    for number, stream in enumerate((a, b, c)):
        stream.token_ids = [7] * number
    rows = _placed({0: a, 1: b, 2: c})
    assert _tokens(rows, logits_BV) == _tokens(_placed({0: a, 1: b, 2: c}), logits_BV)
    a.token_ids = [7, 7, 7]
    assert _tokens(rows, logits_BV) == _tokens(_placed({0: a, 1: b, 2: c}), logits_BV)
    rows.move(2, 0, swaps=True)
    assert _tokens(rows, logits_BV) == _tokens(_placed({0: c, 1: b, 2: a}), logits_BV)
    rows.remove(1)
    assert _tokens(rows, logits_BV) == _tokens(_placed({0: c, 2: a}), logits_BV)
    rows.move(2, 1, swaps=False)
    assert _tokens(rows, logits_BV[:2]) == _tokens(_placed({0: c, 1: a}), logits_BV[:2])
    d = Stream(4, warm, forced=(11, 12))
    rows.add(1, d, token_ids=[5])
    assert _tokens(rows, logits_BV[:2]) == [_tokens(_placed({0: c}), logits_BV[:1])[0], 12]
