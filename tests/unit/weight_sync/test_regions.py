# SPDX-License-Identifier: Apache-2.0
"""Boxes: intersection, difference, and messages that hold each element once."""

from __future__ import annotations

import itertools
import random

import pytest

from tandem.weight_sync.regions import Region, fill, intersection, subtract


def _elements(box: Region) -> set[tuple[int, ...]]:
    ranges = (range(o, o + s) for o, s in zip(box.offset, box.size, strict=True))
    return set(itertools.product(*ranges))


def _random_box(source: random.Random, dimensions: int) -> Region:
    offset = tuple(source.randrange(4) for _ in range(dimensions))
    return Region(offset, tuple(source.randrange(1, 5) for _ in range(dimensions)))


@pytest.mark.parametrize("dimensions", [0, 1, 2, 3])
def test_boxes_are_the_sets_of_their_elements(dimensions: int) -> None:
    source = random.Random(dimensions)
    for _ in range(200):
        left, right = (_random_box(source, dimensions) for _ in range(2))
        common = intersection(left, right)
        assert (_elements(common) if common else set()) == _elements(left) & _elements(right)
        if common:
            rest = subtract(left, common)
            assert set().union(*map(_elements, rest)) == _elements(left) - _elements(right)
            assert sum(box.num_elements for box in rest) == len(_elements(left) - _elements(right))


@pytest.mark.parametrize("capacity", [16, 24, 48, 100, 1000])
def test_messages_hold_every_element_once_and_keep_to_their_size(capacity: int) -> None:
    boxes = [((7, 3), 2), ((), 4), ((0, 4), 4), ((2, 3, 5), 2), ((1, 40), 4), ((13,), 8)]
    sized = [(Region((5,) * len(size), size), item_bytes) for size, item_bytes in boxes]
    messages = list(fill(sized, capacity=capacity, alignment=16))
    seen: list[list[tuple[int, ...]]] = [[] for _ in sized]
    for message in messages:
        end = 0
        assert message
        for index, box, start in message:
            assert start % 16 == 0
            assert start >= end
            end = start + box.num_elements * sized[index][1]
            seen[index] += sorted(_elements(box))
        assert end <= capacity
    for (whole, _), elements in zip(sized, seen, strict=True):
        assert elements == sorted(_elements(whole)), "in order, each once"
    if capacity == 1000:
        assert len(messages) == 1


def test_a_large_tensor_fills_what_is_left_and_is_cut_into_whole_rows() -> None:
    sized = [(Region((0,), (8,)), 4), (Region((0, 0), (10, 8)), 4)]
    messages = list(fill(sized, capacity=128, alignment=16))
    assert [[(box.size, start) for _, box, start in message] for message in messages] == [
        [((8,), 0), ((3, 8), 32)],
        [((4, 8), 0)],
        [((3, 8), 0)],
    ]
