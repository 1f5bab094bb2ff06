# SPDX-License-Identifier: Apache-2.0
"""Who sends which box of which tensor to whom, as a pure function of all layouts.

Every process computes the same plan from the same layouts, so that a mistake in one of them is the
same error in all, before a byte moves. Messages have one order in all processes: whoever starts
his in that order, however few buckets he has, never waits for somebody who waits for him.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.types import SliceSpec
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.regions import Box, fill, intersection, subtract

ALIGNMENT = 16
"""Bytes. Each piece starts at a multiple of it, so that a view in any dtype is possible."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What one process can send and what it needs, in the order of its model."""

    sends: tuple[SliceSpec, ...] = ()
    needs: tuple[SliceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """A box of the tensor ``name``, in the dtype of those who need it."""

    name: str
    dtype: torch.dtype
    box: Box

    @property
    def num_bytes(self) -> int:
        """Without padding."""
        return self.box.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Piece:
    """A part in a message. ``number`` is unique in the plan, ``start`` its first byte."""

    number: int
    part: Part
    start: int


@dataclass(frozen=True, slots=True)
class Route:
    """One process that sends, and all that receive the same from it, ascending."""

    sender: int
    receivers: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """Everybody who takes part, ascending."""
        return tuple(sorted({self.sender, *self.receivers}))


@dataclass(frozen=True, slots=True)
class Message:
    """What is broadcast at once along a route."""

    route: Route
    pieces: tuple[Piece, ...]

    @property
    def num_bytes(self) -> int:
        """Its length."""
        last = self.pieces[-1]
        return last.start + last.part.num_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All that happens in one transfer.

    Attributes:
        messages: in the order in which every process starts his.
        local: for each process, the parts that it both holds and needs.
    """

    messages: tuple[Message, ...]
    local: tuple[tuple[Part, ...], ...]

    @property
    def routes(self) -> list[Route]:
        """In an order that is the same everywhere."""
        return sorted({m.route for m in self.messages}, key=lambda r: (r.sender, r.receivers))

    def sent_by(self, rank: int) -> list[Message]:
        """The messages of a sender, in order."""
        return [message for message in self.messages if message.route.sender == rank]

    def received_by(self, rank: int) -> list[Message]:
        """The messages of a receiver, in order."""
        return [message for message in self.messages if rank in message.route.receivers]


Holders = Mapping[Box, tuple[int, ...]]
"""The distinct boxes of one tensor that are held, and by whom."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """A part that an island needs, and who holds it."""

    part: Part
    sources: tuple[int, ...]
    island: str


def make_plan(
    layouts: Sequence[Layout], *, message_bytes: int, islands: Sequence[str] = ()
) -> Plan:
    """The plan for processes 0, 1, ... with these layouts.

    A box that several hold is sent by one of them; bytes are balanced over the senders.

    Args:
        islands: of each process, those between which its devices talk natively. All receivers of a
            message are of one island, so that it enters an island once. One island if empty.

    Raises:
        SyncError: a tensor that nobody holds, one that nobody needs, shapes that differ, a hole.
    """
    _check_tensors(layouts)
    holders = _holders(layouts)
    demands: dict[_Demand, tuple[int, ...]] = {}
    local: list[list[Part]] = [[] for _ in layouts]
    for rank, layout in enumerate(layouts):
        needed = [_cover(need, holders[need.name], receiver=rank) for need in layout.needs]
        for part, sources in itertools.chain.from_iterable(needed):
            if rank in sources:
                local[rank].append(part)
            else:
                demand = _Demand(part, sources, islands[rank] if islands else "")
                demands[demand] = (*demands.get(demand, ()), rank)
    routes = [
        [(route, content) for content in _contents(parts, message_bytes)]
        for route, parts in _choose_senders(demands).items()
    ]
    return Plan(messages=tuple(_in_turn(routes)), local=tuple(map(tuple, local)))


def _check_tensors(layouts: Sequence[Layout]) -> None:
    """The names that are held are those that are needed, with one shape everywhere."""
    first: dict[str, tuple[int, SliceSpec]] = {}
    for rank, layout in enumerate(layouts):
        for spec in (*layout.sends, *layout.needs):
            other, known = first.setdefault(spec.name, (rank, spec))
            if known.shape != spec.shape:
                raise SyncError(
                    f"{spec.name}: its shape is {known.shape} in rank {other} "
                    f"and {spec.shape} in rank {rank}"
                )
        _check_disjoint(layout.needs, rank)
    held = {spec.name for layout in layouts for spec in layout.sends}
    needed = {spec.name for layout in layouts for spec in layout.needs}
    for name, (rank, _) in first.items():
        if name not in held:
            raise SyncError(f"{name}: rank {rank} needs it and nobody holds it")
        if name not in needed:
            raise SyncError(f"{name}: rank {rank} holds it and nobody needs it")


def _check_disjoint(needs: Sequence[SliceSpec], rank: int) -> None:
    boxes: dict[str, list[Box]] = {}
    for spec in needs:
        box = Box(spec.offset, spec.size)
        others = boxes.setdefault(spec.name, [])
        if any(intersection(box, other) for other in others):
            raise SyncError(f"{spec.name}: rank {rank} lists {box} twice")
        others.append(box)


def _holders(layouts: Sequence[Layout]) -> dict[str, dict[Box, tuple[int, ...]]]:
    holders: dict[str, dict[Box, tuple[int, ...]]] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.sends:
            boxes = holders.setdefault(spec.name, {})
            box = Box(spec.offset, spec.size)
            boxes[box] = (*boxes.get(box, ()), rank)
    return holders


def _cover(
    need: SliceSpec, holders: Holders, *, receiver: int
) -> list[tuple[Part, tuple[int, ...]]]:
    """Cut what is needed along what is held, first of all by the receiver itself."""
    found: list[tuple[Part, tuple[int, ...]]] = []
    holes = [Box(need.offset, need.size)] if 0 not in need.size else []
    for box, sources in sorted(holders.items(), key=lambda item: receiver not in item[1]):
        overlaps = [(hole, intersection(hole, box)) for hole in holes]
        for hole, common in overlaps:
            if common is not None:
                holes.remove(hole)
                holes += subtract(hole, common)
                found.append((Part(need.name, need.dtype, common), sources))
    if holes:
        raise SyncError(f"{need.name}: rank {receiver} needs {holes[0]} and nobody holds it")
    return found


def _choose_senders(demands: Mapping[_Demand, tuple[int, ...]]) -> dict[Route, list[Part]]:
    """The largest part first, to the holder with the least to send so far. The parts of a route
    stay in their order."""
    loads: dict[int, int] = {}
    senders: dict[_Demand, int] = {}
    for demand in sorted(demands, key=lambda demand: -demand.part.num_bytes):
        sender = min(demand.sources, key=lambda rank: (loads.get(rank, 0), rank))
        loads[sender] = loads.get(sender, 0) + demand.part.num_bytes
        senders[demand] = sender
    routes: dict[Route, list[Part]] = {}
    for demand, receivers in demands.items():
        routes.setdefault(Route(senders[demand], receivers), []).append(demand.part)
    return routes


def _contents(parts: Sequence[Part], message_bytes: int) -> Iterator[list[tuple[Part, int]]]:
    """The parts of a route by message, each with its first byte."""
    sized = [(part.box, part.dtype.itemsize) for part in parts]
    for boxes in fill(sized, capacity=message_bytes, alignment=ALIGNMENT):
        yield [
            (Part(parts[index].name, parts[index].dtype, box), start) for index, box, start in boxes
        ]


def _in_turn(
    routes: Sequence[Sequence[tuple[Route, list[tuple[Part, int]]]]],
) -> Iterator[Message]:
    """One message of each route after the other."""
    numbers = itertools.count()
    for messages in itertools.zip_longest(*routes):
        for route, content in filter(None, messages):
            pieces = (Piece(next(numbers), part, start) for part, start in content)
            yield Message(route, tuple(pieces))
