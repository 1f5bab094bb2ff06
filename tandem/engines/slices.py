# SPDX-License-Identifier: Apache-2.0
"""Which boxes of the whole parameters a process holds, and views by them.

A process's part of a parameter is some boxes of the whole on top of each other: one of all rows
where it is held whole, of some rows where it is sharded, and where a fused matrix is split between
heads one for each of query, key and value. No weights are kept here, and nothing is communicated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tandem.models.parallel import Boxes
from tandem.types import SliceSpec


class Holding(Protocol):
    """What one process holds of every parameter."""

    @property
    def boxes(self) -> Mapping[str, Boxes]:
        """Of all parameters in their order; none for one of which nothing is held."""
        ...

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The whole of a tensor shaped like parameter ``name``, of which this process has ``part``.

        Collective: all that share the parameter call it for the same names in the same order.
        """
        ...


@dataclass(frozen=True, slots=True)
class WholeHolding:
    """``Holding`` of a process that holds everything."""

    boxes: Mapping[str, Boxes]

    def whole(self, name: str, part: Tensor) -> Tensor:
        """The part itself."""
        return part


def whole_holding(parameters: Mapping[str, Tensor]) -> WholeHolding:
    """One box a parameter, which is all of it."""
    boxes = {}
    for name, tensor in parameters.items():
        shape = tuple(tensor.shape)
        boxes[name] = (SliceSpec(name, tensor.dtype, shape, (0,) * len(shape), shape),)
    return WholeHolding(boxes)


def stacked(boxes: Boxes) -> Iterator[tuple[int, SliceSpec]]:
    """Boxes on top of each other, each with the row it begins at."""
    at = 0
    for box in boxes:
        yield at, box
        at += box.size[0]


def in_whole(whole: Tensor, box: SliceSpec) -> Tensor:
    """The view of a whole tensor that a box describes."""
    for dimension, (offset, size) in enumerate(zip(box.offset, box.size, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    return whole
