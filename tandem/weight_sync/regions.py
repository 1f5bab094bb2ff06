# SPDX-License-Identifier: Apache-2.0
"""Rectangular regions of index space: intersection, difference, and cutting to a size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Region:
    """A box of indices: ``size[d]`` indices from ``offset[d]`` on, in each dimension d."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """The number of elements: 1 without dimensions, 0 if a dimension is empty."""
        return prod(self.size)

    def interval(self, dimension: int, start: int, *, stop: int) -> Region:
        """Return the part from ``start`` to ``stop`` along a dimension, relative to the region."""
        offset, size = list(self.offset), list(self.size)
        offset[dimension] += start
        size[dimension] = stop - start
        return Region(tuple(offset), tuple(size))

    def __str__(self) -> str:
        ranges = (
            f"{start}:{start + size}" for start, size in zip(self.offset, self.size, strict=True)
        )
        return f"[{', '.join(ranges)}]"


def contains(region: Region, part: Region) -> bool:
    """Return whether ``part`` lies in ``region``."""
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(region.offset, region.size, part.offset, part.size, strict=True)
    )


def intersection(left: Region, right: Region) -> Region | None:
    """Return the region that both contain, or None if they are disjoint."""
    starts = tuple(map(max, left.offset, right.offset))
    stops = (
        min(a + m, b + n)
        for a, m, b, n in zip(left.offset, left.size, right.offset, right.size, strict=True)
    )
    common = Region(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))
    return common if all(size > 0 for size in common.size) else None


def subtract(region: Region, part: Region) -> list[Region]:
    """Return disjoint regions that cover ``region`` without ``part``, which must lie in it."""
    rest: list[Region] = []
    for dimension in range(len(region.size)):
        start = part.offset[dimension] - region.offset[dimension]
        stop = start + part.size[dimension]
        outside = ((0, start), (stop, region.size[dimension]))
        rest += [region.interval(dimension, a, stop=b) for a, b in outside if a < b]
        region = region.interval(dimension, start, stop=stop)
    return rest


def cut(region: Region, *, capacity: int, room: int) -> Sequence[Region]:
    """Cut a region into a first part of at most ``room`` elements and the rest.

    If ``room`` is too small for any part, the first part has at most ``capacity`` elements: it
    begins the next message. A region is cut across its outermost possible dimension, so that the
    parts of a contiguous tensor stay contiguous.
    """
    if region.num_elements <= max(1, room):
        return [region]
    dimension = next(d for d, size in enumerate(region.size) if size > 1)
    inner = prod(region.size[dimension + 1 :])
    count = room // inner or min(capacity // inner, region.size[dimension])
    if count:
        if count == region.size[dimension]:
            return [region]
        rest = region.interval(dimension, count, stop=region.size[dimension])
        return [region.interval(dimension, 0, stop=count), rest]
    first, *others = cut(region.interval(dimension, 0, stop=1), capacity=capacity, room=room)
    rest = region.interval(dimension, 1, stop=region.size[dimension])
    return [first, *others, rest]


def fill(
    sized: Sequence[tuple[Region, int]], *, capacity: int, alignment: int
) -> Iterator[list[tuple[int, Region, int]]]:
    """Put regions into messages of at most ``capacity`` bytes, in order, cut where they do not fit.

    Args:
        sized: regions, each with the bytes of one of its elements.
        alignment: each region starts at a multiple of this number of bytes.

    Yields:
        for each message its regions as (index into ``sized``, region, first byte).
    """
    message: list[tuple[int, Region, int]] = []
    end = 0
    for index, (whole, item_bytes) in enumerate(sized):
        rest = [whole] if whole.num_elements else []
        while rest:
            start = -(-end // alignment) * alignment
            room = max(0, capacity - start) // item_bytes
            first, *rest = [*cut(rest[0], capacity=capacity // item_bytes, room=room), *rest[1:]]
            if first.num_elements > room:
                yield message
                message, start = [], 0
            message.append((index, first, start))
            end = start + first.num_elements * item_bytes
    if message:
        yield message
