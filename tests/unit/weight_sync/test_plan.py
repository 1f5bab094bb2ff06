# SPDX-License-Identifier: Apache-2.0
"""The plan: every needed element comes exactly once, senders share the work, mistakes are named."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tandem.types import SliceSpec
from tandem.weight_sync import plan as planning
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.plan import Layout, Plan, make_plan
from tests.unit.weight_sync.layouts import cut, empty_copy, make_weights

WEIGHTS = make_weights()
GRIDS = ((1, 1), (2, 1), (2, 2), (1, 3), (4, 2))


def _trainers(grid: tuple[int, int]) -> list[tuple[SliceSpec, ...]]:
    ranks = range(grid[0] * grid[1])
    return [tuple(held.spec for held in cut(WEIGHTS, grid, rank=rank)) for rank in ranks]


def _rollout() -> tuple[SliceSpec, ...]:
    return tuple(held.spec for held in empty_copy(WEIGHTS, torch.bfloat16))


def _parts_of_rollout(grid: tuple[int, int]) -> list[tuple[SliceSpec, ...]]:
    ranks = range(grid[0] * grid[1])
    copies = [empty_copy(WEIGHTS, torch.bfloat16, grid, rank=rank) for rank in ranks]
    return [tuple(held.spec for held in copy) for copy in copies]


def _spec(name: str, shape: tuple[int, ...], *, rows: tuple[int, int]) -> SliceSpec:
    start, stop = rows
    offset = (start, *[0] * (len(shape) - 1))
    return SliceSpec(name, torch.float32, shape, offset, (stop - start, *shape[1:]))


def _received(plan: Plan, rank: int) -> Counter[tuple[str, tuple[int, ...]]]:
    """How often each element of each tensor comes to a rank."""
    regions = list(plan.local[rank])
    for message in plan.messages:
        if rank in message.route.receivers:
            regions += [segment.content for segment in message.segments]
    elements: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for one in regions:
        ranges = (range(o, o + s) for o, s in zip(one.region.offset, one.region.size, strict=True))
        elements.update((one.name, index) for index in itertools.product(*ranges))
    return elements


def _all_elements() -> Counter[tuple[str, tuple[int, ...]]]:
    return Counter(
        (name, index)
        for name, tensor in WEIGHTS.items()
        for index in itertools.product(*map(range, tensor.shape))
    )


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("message_bytes", [16, 1024, 1 << 20])
def test_every_element_arrives_once(grid: tuple[int, int], message_bytes: int) -> None:
    trainers = _trainers(grid)
    rollouts = [Layout(needs=_rollout())] * 2
    plan = make_plan(
        [*(Layout(sends=specs) for specs in trainers), *rollouts], message_bytes=message_bytes
    )
    for rank in (len(trainers), len(trainers) + 1):
        assert _received(plan, rank) == _all_elements()
    assert all(message.num_bytes <= message_bytes for message in plan.messages)
    assert all(len(message.route.receivers) == 2 for message in plan.messages)
    assert len({p.number for m in plan.messages for p in m.segments}) == sum(
        len(message.segments) for message in plan.messages
    )


def test_colocated_ranks_send_only_what_the_others_lack() -> None:
    plan = make_plan(
        [Layout(sends=specs, needs=_rollout()) for specs in _trainers((2, 1))],
        message_bytes=1 << 20,
    )
    for rank in (0, 1):
        assert _received(plan, rank) == _all_elements()
    assert {(m.route.sender, m.route.receivers) for m in plan.messages} == {(0, (1,)), (1, (0,))}


def test_one_process_with_both_moves_nothing() -> None:
    plan = make_plan([Layout(_rollout(), _rollout())], message_bytes=1024)
    assert plan.messages == ()
    assert _received(plan, 0) == _all_elements()


def test_bytes_are_balanced_over_those_who_hold_the_same() -> None:
    specs = tuple(_spec(f"w{n}", (10 + n, 10), rows=(0, 10 + n)) for n in range(40))
    layouts = [Layout(sends=specs)] * 4 + [Layout(needs=specs)]
    plan = make_plan(layouts, message_bytes=1 << 20)
    sent = Counter[int]()
    for message in plan.messages:
        sent[message.route.sender] += message.num_bytes
    assert len(sent) == 4
    assert max(sent.values()) - min(sent.values()) <= max(map(_num_bytes, specs))
    assert _received(plan, 4).total() == sum(map(_num_bytes, specs)) // 4


def _num_bytes(spec: SliceSpec) -> int:
    return 4 * spec.size[0] * spec.size[1]


def test_overlapping_holders_and_cut_receivers() -> None:
    whole, rows = _spec("w", (9, 4), rows=(0, 9)), [(0, 5), (5, 9)]
    layouts = [
        Layout(sends=(_spec("w", (9, 4), rows=(2, 9)),)),
        Layout(sends=(whole,)),
        *(Layout(needs=(_spec("w", (9, 4), rows=r),)) for r in rows),
    ]
    plan = make_plan(layouts, message_bytes=64)
    for rank, (start, stop) in zip((2, 3), rows, strict=True):
        assert sorted(_received(plan, rank).elements()) == sorted(
            ("w", index) for index in itertools.product(range(start, stop), range(4))
        )


def test_a8_all_receivers_of_a_message_are_of_one_island() -> None:
    trainers, needs = _trainers((2, 1)), Layout(needs=_rollout())
    layouts = [*(Layout(sends=specs) for specs in trainers), needs, needs, needs]
    islands = ["npu", "npu", "musa", "musa", "cpu"]
    plan = make_plan(layouts, message_bytes=1 << 20, islands=islands)
    assert {route.receivers for route in plan.routes} == {(2, 3), (4,)}
    assert {route.receivers for route in make_plan(layouts, message_bytes=1 << 20).routes} == {
        (2, 3, 4)
    }
    for rank in (2, 3, 4):
        assert _received(plan, rank) == _all_elements()


def test_messages_take_turns_over_the_senders() -> None:
    plan = make_plan(
        [*(Layout(sends=specs) for specs in _trainers((2, 1))), Layout(needs=_rollout())],
        message_bytes=256,
    )
    assert [message.route.sender for message in plan.messages[:6]] == [0, 1, 0, 1, 0, 1]


@dataclass(frozen=True)
class Grids:
    """Processes that train and that generate.

    Attributes:
        first_needing: those that train need all weights too, from this rank on; None: none does.
        num_copies: the number of rollouts, each of which is cut along ``rollout``.
    """

    trainer: tuple[int, int]
    rollout: tuple[int, int] = (1, 1)
    num_copies: int = 0
    first_needing: int | None = None
    islands: Sequence[str] = ()

    @property
    def layouts(self) -> list[Layout]:
        """The layouts of all processes."""
        needing = range(10**6)[self.first_needing :] if self.first_needing is not None else ()
        training = [
            Layout(sends=specs, needs=_rollout() if rank in needing else ())
            for rank, specs in enumerate(_trainers(self.trainer))
        ]
        parts = [Layout(needs=specs) for specs in _parts_of_rollout(self.rollout)]
        return [*training, *parts * self.num_copies]


@pytest.mark.parametrize(
    ("grids", "digest"),
    [
        (Grids((4, 2), num_copies=3), "ecc0315088d20a14"),
        (Grids((4, 2), (2, 2), num_copies=2), "b062be0afda1ba22"),
        (Grids((1, 3), (3, 1), num_copies=2), "669d5270572f4d25"),
        (Grids((3, 1), first_needing=0), "e31608ccf087401e"),
        (Grids((4, 1), num_copies=1, first_needing=1), "5337e8501320065c"),
        (Grids((2, 2), (2, 1), num_copies=2, first_needing=0), "0c8fed8b0eb87166"),
        (Grids((2, 3), num_copies=1, first_needing=3), "19ccf4e42d1b9cca"),
        (Grids((2, 1), num_copies=4, islands=(*"aabcbc",)), "1b094b8970b682bd"),
    ],
    ids=["apart", "parts", "columns", "colocated", "rows", "some colocated", "grid", "islands"],
)
def test_plans_stay_what_they_were(grids: Grids, digest: str) -> None:
    """The digests are those of plans for which each process cut its slices by itself."""
    plan = make_plan(grids.layouts, message_bytes=512, islands=grids.islands)
    text = repr((plan.messages, plan.local))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("holds", [True, False])
def test_what_many_processes_need_is_cut_once(holds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they also hold rows of it or not; 64 and 64 processes took 20 s otherwise."""
    calls: list[str] = []
    original = planning.subtract

    def counting(*args: planning.Region) -> list[planning.Region]:
        calls.append("")
        return original(*args)

    monkeypatch.setattr(planning, "subtract", counting)
    counts: list[int] = []
    for num_receivers in (1, 8):
        calls.clear()
        first_needing = 0 if holds else None
        grids = Grids((8, 1), num_copies=num_receivers, first_needing=first_needing)
        make_plan(grids.layouts, message_bytes=1 << 20)
        counts.append(len(calls))
    assert counts[0] == counts[1] <= 8 * len(WEIGHTS)


@pytest.mark.parametrize(
    ("sends", "needs", "message"),
    [
        (
            [("a", 4, (0, 4))],
            [("a", 4, (0, 4)), ("b", 4, (0, 4))],
            "b: rank 1 needs it and no rank",
        ),
        (
            [("a", 4, (0, 4)), ("b", 4, (0, 4))],
            [("a", 4, (0, 4))],
            "b: rank 0 holds it and no rank",
        ),
        (
            [("a", 4, (0, 4))],
            [("a", 5, (0, 5))],
            r"a: its shape is \(4, 2\) in rank 0 and \(5, 2\)",
        ),
        ([("a", 6, (0, 2)), ("a", 6, (3, 6))], [("a", 6, (0, 6))], r"a: rank 1 needs \[2:3, 0:2\]"),
        ([("a", 4, (0, 4))], [("a", 4, (0, 3)), ("a", 4, (2, 4))], r"a: rank 1 lists \[2:4, 0:2\]"),
    ],
)
def test_layouts_that_do_not_match_are_named(
    sends: list[tuple[str, int, tuple[int, int]]],
    needs: list[tuple[str, int, tuple[int, int]]],
    message: str,
) -> None:
    sent, needed = (
        tuple(_spec(name, (size, 2), rows=rows) for name, size, rows in specs)
        for specs in (sends, needs)
    )
    with pytest.raises(SyncError, match=message):
        make_plan([Layout(sends=sent), Layout(needs=needed)], message_bytes=1024)
