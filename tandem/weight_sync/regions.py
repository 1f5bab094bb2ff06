# SPDX-License-Identifier: Apache-2.0
"""Boxes of index space: intersection, difference, and cutting to a size. Plain integers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Box:
    """``size[d]`` indices from ``offset[d]`` on, in each dimension d."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """1 without dimensions, 0 if any of them is empty."""
        return prod(self.size)

    def interval(self, dimension: int, start: int, *, stop: int) -> Box:
        """Its part from ``start`` up to ``stop`` along one dimension, counted within the box."""
        offset, size = list(self.offset), list(self.size)
        offset[dimension] += start
        size[dimension] = stop - start
        return Box(tuple(offset), tuple(size))

    def __str__(self) -> str:
        ranges = (
            f"{start}:{start + size}" for start, size in zip(self.offset, self.size, strict=True)
        )
        return f"[{', '.join(ranges)}]"


def contains(box: Box, part: Box) -> bool:
    """Whether ``part`` lies in ``box``."""
    return all(
        a <= b and b + m <= a + n
        for a, n, b, m in zip(box.offset, box.size, part.offset, part.size, strict=True)
    )


def intersection(left: Box, right: Box) -> Box | None:
    """What both contain, None if nothing."""
    starts = tuple(map(max, left.offset, right.offset))
    stops = (
        min(a + m, b + n)
        for a, m, b, n in zip(left.offset, left.size, right.offset, right.size, strict=True)
    )
    common = Box(starts, tuple(stop - start for start, stop in zip(starts, stops, strict=True)))
    return common if all(size > 0 for size in common.size) else None


def subtract(box: Box, part: Box) -> list[Box]:
    """Disjoint boxes that make up ``box`` without ``part``, which lies in it."""
    rest: list[Box] = []
    for dimension in range(len(box.size)):
        start = part.offset[dimension] - box.offset[dimension]
        stop = start + part.size[dimension]
        outside = ((0, start), (stop, box.size[dimension]))
        rest += [box.interval(dimension, a, stop=b) for a, b in outside if a < b]
        box = box.interval(dimension, start, stop=stop)
    return rest


def cut(box: Box, *, capacity: int, room: int) -> Sequence[Box]:
    """Cut a box into a first one of at most ``room`` elements and the rest.

    Without ``room`` for anything the first one has at most ``capacity``: it starts another
    message. Cuts run across the outermost dimension that they can, so that the boxes of a
    contiguous tensor stay contiguous.
    """
    if box.num_elements <= max(1, room):
        return [box]
    dimension = next(d for d, size in enumerate(box.size) if size > 1)
    inner = prod(box.size[dimension + 1 :])
    count = room // inner or min(capacity // inner, box.size[dimension])
    if count:
        if count == box.size[dimension]:
            return [box]
        rest = box.interval(dimension, count, stop=box.size[dimension])
        return [box.interval(dimension, 0, stop=count), rest]
    first, *others = cut(box.interval(dimension, 0, stop=1), capacity=capacity, room=room)
    rest = box.interval(dimension, 1, stop=box.size[dimension])
    return [first, *others, rest]


def fill(
    sized: Sequence[tuple[Box, int]], *, capacity: int, alignment: int
) -> Iterator[list[tuple[int, Box, int]]]:
    """Put boxes into messages of at most ``capacity`` bytes, in order, cut where they do not fit.

    Args:
        sized: boxes and the bytes of one of their elements.
        alignment: each box starts at a multiple of so many bytes.

    Yields:
        for each message its boxes as (index into ``sized``, box, first byte).
    """
    message: list[tuple[int, Box, int]] = []
    end = 0
    for index, (whole, item_bytes) in enumerate(sized):
        boxes = [whole] if whole.num_elements else []
        while boxes:
            start = -(-end // alignment) * alignment
            room = max(0, capacity - start) // item_bytes
            box, *boxes = [*cut(boxes[0], capacity=capacity // item_bytes, room=room), *boxes[1:]]
            if box.num_elements > room:
                yield message
                message, start = [], 0
            message.append((index, box, start))
            end = start + box.num_elements * item_bytes
    if message:
        yield message
