# SPDX-License-Identifier: Apache-2.0
"""The plan of a transfer: which process sends which region of which tensor to which processes.

Every process computes the same plan from the layouts of all, so an inconsistent layout is the same
error in all of them, before a byte moves. Messages have one order. If all processes start their
messages in this order, with any number of buckets, no two of them wait for each other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tandem.types import HeldSlice, SliceSpec
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.regions import Region, contains, fill, intersection, subtract

ALIGNMENT = 16
"""The alignment of segments in bytes, which allows views in any dtype."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The slices that one process holds and those that it needs, in the order of its model."""

    sends: tuple[SliceSpec, ...] = ()
    needs: tuple[SliceSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorRegion:
    """A region of the tensor ``name``, in the dtype of the processes that need it."""

    name: str
    dtype: torch.dtype
    region: Region

    @property
    def num_bytes(self) -> int:
        """The number of bytes without padding."""
        return self.region.num_elements * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A tensor's region in a message.

    Attributes:
        number: the number of the segment, unique in the plan.
        content: the region.
        start: the offset of its first byte in the message.
    """

    number: int
    content: TensorRegion
    start: int


@dataclass(frozen=True, slots=True)
class Route:
    """A sender and the processes that receive the same messages from it, ascending."""

    sender: int
    receivers: tuple[int, ...]

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the sender and the receivers, ascending."""
        return tuple(sorted({self.sender, *self.receivers}))


@dataclass(frozen=True, slots=True)
class Message:
    """The bytes of one broadcast along a route."""

    route: Route
    segments: tuple[Segment, ...]

    @property
    def num_bytes(self) -> int:
        """The length in bytes."""
        last = self.segments[-1]
        return last.start + last.content.num_bytes


@dataclass(frozen=True, slots=True)
class Plan:
    """All copies of one transfer.

    Attributes:
        messages: all messages; every process starts its own in this order.
        local: for each process, the regions that it both holds and needs.
    """

    messages: tuple[Message, ...]
    local: tuple[tuple[TensorRegion, ...], ...]

    @property
    def routes(self) -> list[Route]:
        """The distinct routes, in an order that is the same in all processes."""
        return sorted({m.route for m in self.messages}, key=lambda r: (r.sender, r.receivers))

    def sent_by(self, rank: int) -> list[Message]:
        """Return the messages of a sender, in order."""
        return [message for message in self.messages if message.route.sender == rank]

    def received_by(self, rank: int) -> list[Message]:
        """Return the messages of a receiver, in order."""
        return [message for message in self.messages if rank in message.route.receivers]


@dataclass(frozen=True, slots=True)
class SliceView:
    """A region's place among the slices of a process.

    Attributes:
        index: the slice that contains it.
        intervals: (dimension, start, length) for each dimension that it does not fill.
    """

    index: int
    intervals: tuple[tuple[int, int, int], ...]

    def tensor(self, slices: Sequence[HeldSlice]) -> Tensor:
        """Return the region as a view. The caller disables gradients.

        Raises:
            SyncError: the slice's storage has been freed.
        """
        held = slices[self.index]
        view = held.tensor
        try:
            for dimension, start, length in self.intervals:
                view = view.narrow(dimension, start, length)
        except RuntimeError as error:
            raise SyncError(f"{held.spec.name}: its storage cannot be used ({error})") from error
        return view


def locate(regions: Iterable[TensorRegion], specs: Sequence[SliceSpec]) -> list[SliceView]:
    """Return the place of each region in the slice that contains it."""
    listed: dict[str, list[tuple[int, Region]]] = {}
    for index, spec in enumerate(specs):
        listed.setdefault(spec.name, []).append((index, Region(spec.offset, spec.size)))
    views: list[SliceView] = []
    for one in regions:
        index, held = next(item for item in listed[one.name] if contains(item[1], one.region))
        intervals = (
            (dimension, one.region.offset[dimension] - held.offset[dimension], size)
            for dimension, size in enumerate(one.region.size)
            if size < held.size[dimension]
        )
        views.append(SliceView(index, tuple(intervals)))
    return views


Holders = Mapping[Region, tuple[int, ...]]
"""The distinct regions of one tensor that are held, each with the ranks that hold it."""


@dataclass(frozen=True, slots=True)
class _Demand:
    """A region that an island needs, and the ranks that hold it."""

    content: TensorRegion
    sources: tuple[int, ...]
    island: str


def make_plan(
    layouts: Sequence[Layout], *, message_bytes: int, islands: Sequence[str] = ()
) -> Plan:
    """Return the plan for processes 0, 1, ... with these layouts.

    One process sends a region that several hold; bytes are balanced over the senders.

    Args:
        islands: the island of each process: devices with a native library in common. All
            receivers of a message are in one island, so that the message enters it once. Empty
            for a single island.

    Raises:
        SyncError: a tensor or a part of one is held or needed by no process, or shapes differ.
    """
    _check_tensors(layouts)
    covers = _Covers(_holders(layouts))
    demands: dict[_Demand, list[int]] = {}
    local: list[list[TensorRegion]] = [[] for _ in layouts]
    for rank, layout in enumerate(layouts):
        island = islands[rank] if islands else ""
        for part in covers.parts_of(layout, rank):
            if rank in part.sources:
                local[rank].append(part.content)
            else:
                part.receivers_in(island, demands).append(rank)
    routes = [
        [(route, filled) for filled in _messages_of(contents, message_bytes)]
        for route, contents in _choose_senders(demands).items()
    ]
    return Plan(messages=tuple(_in_turn(routes)), local=tuple(map(tuple, local)))


def _check_tensors(layouts: Sequence[Layout]) -> None:
    """Raise SyncError unless every tensor is held and needed, with one shape."""
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
            raise SyncError(f"{name}: rank {rank} needs it and no rank holds it")
        if name not in needed:
            raise SyncError(f"{name}: rank {rank} holds it and no rank needs it")


def _check_disjoint(needs: Sequence[SliceSpec], rank: int) -> None:
    regions: dict[str, list[Region]] = {}
    for spec in needs:
        region = Region(spec.offset, spec.size)
        others = regions.setdefault(spec.name, [])
        if any(intersection(region, other) for other in others):
            raise SyncError(f"{spec.name}: rank {rank} lists {region} twice")
        others.append(region)


def _holders(layouts: Sequence[Layout]) -> dict[str, dict[Region, tuple[int, ...]]]:
    holders: dict[str, dict[Region, tuple[int, ...]]] = {}
    for rank, layout in enumerate(layouts):
        for spec in layout.sends:
            held = holders.setdefault(spec.name, {})
            region = Region(spec.offset, spec.size)
            held[region] = (*held.get(region, ()), rank)
    return holders


@dataclass(slots=True)
class _Part:
    """A part of a needed slice.

    Attributes:
        sources: the ranks that hold it.
        receivers: for each island, the ranks to which it has to be sent.
    """

    content: TensorRegion
    sources: tuple[int, ...]
    receivers: dict[str, list[int]] = field(default_factory=dict[str, list[int]])

    def receivers_in(self, island: str, demands: dict[_Demand, list[int]]) -> list[int]:
        """Return the receivers in an island, which ``demands`` lists too."""
        found = self.receivers.get(island)
        if found is None:
            found = demands.setdefault(_Demand(self.content, self.sources, island), [])
            self.receivers[island] = found
        return found


class _Covers:
    """Needed slices, cut along the held regions. What many processes need is cut only once."""

    def __init__(self, holders: Mapping[str, Holders]) -> None:
        self._holders = holders
        self._parts: dict[SliceSpec, list[_Part]] = {}
        self._rows: dict[SliceSpec, bool] = {}

    def parts_of(self, layout: Layout, rank: int) -> Iterator[_Part]:
        """Yield the parts of all slices that a process needs, of each those that it holds first."""
        held = {spec.name for spec in layout.sends}
        for need in layout.needs:
            yield from self._cut(need, receiver=rank, holds=need.name in held)

    def _cut(self, need: SliceSpec, *, receiver: int, holds: bool) -> list[_Part]:
        holders = self._holders[need.name]
        parts = self._parts.get(need)
        if parts is None:
            parts = self._parts[need] = _cover(need, holders, receiver=receiver)
            self._rows[need] = _are_rows(need, parts, holders=holders)
        if not holds:
            return parts
        if self._rows[need]:
            return sorted(parts, key=lambda part: receiver not in part.sources)
        own_first = sorted(holders.items(), key=lambda item: receiver not in item[1])
        return _cover(need, dict(own_first), receiver=receiver)


def _are_rows(need: SliceSpec, parts: Sequence[_Part], *, holders: Holders) -> bool:
    """Return whether the parts are the same in whatever order the held regions are taken.

    This is so if no held regions overlap within the slice, and all cut it along one dimension.
    """
    whole = Region(need.offset, need.size)
    within = [common for region in holders if (common := intersection(region, whole))]
    if sum(region.num_elements for region in within) != whole.num_elements:
        return False
    cuts = {
        dimension
        for part in parts
        for dimension, size in enumerate(part.content.region.size)
        if size < need.size[dimension]
    }
    return len(cuts) <= 1


def _cover(need: SliceSpec, holders: Holders, *, receiver: int) -> list[_Part]:
    """Cut a needed slice along the held regions, in their order."""
    found: list[_Part] = []
    holes = [Region(need.offset, need.size)] if 0 not in need.size else []
    for region, sources in holders.items():
        overlaps = [(hole, intersection(hole, region)) for hole in holes]
        for hole, common in overlaps:
            if common is not None:
                holes.remove(hole)
                holes += subtract(hole, common)
                found.append(_Part(TensorRegion(need.name, need.dtype, common), sources))
    if holes:
        raise SyncError(f"{need.name}: rank {receiver} needs {holes[0]} and no rank holds it")
    return found


def _choose_senders(demands: Mapping[_Demand, Sequence[int]]) -> dict[Route, list[TensorRegion]]:
    """Assign the largest regions first, each to the holder with the fewest bytes so far."""
    loads: dict[int, int] = {}
    senders: dict[_Demand, int] = {}
    for demand in sorted(demands, key=lambda demand: -demand.content.num_bytes):
        sender = min(demand.sources, key=lambda rank: (loads.get(rank, 0), rank))
        loads[sender] = loads.get(sender, 0) + demand.content.num_bytes
        senders[demand] = sender
    routes: dict[Route, list[TensorRegion]] = {}
    for demand, receivers in demands.items():
        routes.setdefault(Route(senders[demand], tuple(receivers)), []).append(demand.content)
    return routes


def _messages_of(
    contents: Sequence[TensorRegion], message_bytes: int
) -> Iterator[list[tuple[TensorRegion, int]]]:
    """Yield the regions of a route by message, each with its first byte."""
    sized = [(one.region, one.dtype.itemsize) for one in contents]
    for filled in fill(sized, capacity=message_bytes, alignment=ALIGNMENT):
        yield [
            (TensorRegion(contents[index].name, contents[index].dtype, region), start)
            for index, region, start in filled
        ]


def _in_turn(
    routes: Sequence[Sequence[tuple[Route, list[tuple[TensorRegion, int]]]]],
) -> Iterator[Message]:
    """Yield the messages, one of each route in turn."""
    numbers = itertools.count()
    for messages in itertools.zip_longest(*routes):
        for route, filled in filter(None, messages):
            segments = (Segment(next(numbers), content, start) for content, start in filled)
            yield Message(route, tuple(segments))
