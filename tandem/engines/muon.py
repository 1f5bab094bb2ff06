# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024): momentum, orthogonalised by Newton-Schulz iterations; matrices only.

The update of ``torch.optim.Muon`` with ``adjust_lr_fn="original"``, in two points different: a
parameter may hold several matrices on top of each other, each of which is orthogonalised for
itself, and matrices of equal shape go through the iteration as one batch, which is several times as
fast for small models. Matrices that are spread over processes are orthogonalised whole by each.

Shapes: N matrices of one shape, A rows, B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.engines.adamw import Moments
from tandem.engines.slices import Holding, stacked

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows ``start .. start + rows`` of the whole parameter ``owner``: one linear map."""

    owner: str
    start: int
    rows: int
    columns: int

    def of(self, whole: Tensor) -> Tensor:
        """These rows of a tensor shaped like the owner, (A, B)."""
        return whole[self.start : self.start + self.rows]


class Muon:
    """Nesterov momentum and decoupled weight decay. The matrices of one owner must cover it.

    Args:
        holding: what of each owner this process holds.
    """

    def __init__(
        self, matrices: Sequence[Matrix], *, weight_decay: float, holding: Holding
    ) -> None:
        self._by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            self._by_shape[matrix.rows, matrix.columns].append(matrix)
        self._weight_decay = weight_decay
        self._holding = holding
        self.moments: Moments = {}

    def adopt(self, moments: Moments) -> None:
        """Take over moments of the same weights."""
        self.moments = moments

    @torch.no_grad()
    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> None:
        """Update the owners in place. Collective where they are spread over processes."""
        self.moments = self.moments or self.zero_moments(weights)
        updates: dict[str, Tensor] = {}
        for name, momentum in zip(weights, self.moments["momentum"], strict=True):
            momentum.lerp_(gradients[name], 1 - _MOMENTUM)
            update = gradients[name].lerp(momentum, _MOMENTUM).bfloat16()
            updates[name] = self._holding.whole(name, update)
        for (rows, columns), matrices in self._by_shape.items():
            stacked_NAB = torch.stack([matrix.of(updates[matrix.owner]) for matrix in matrices])
            adjusted = rate * math.sqrt(max(1.0, rows / columns))
            for matrix, update_AB in zip(matrices, orthogonalise(stacked_NAB), strict=True):
                part = weights[matrix.owner]
                for weight, update in self._held(matrix, part, update_AB=update_AB):
                    weight.mul_(1 - rate * self._weight_decay).sub_(update, alpha=adjusted)

    def zero_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """What the first step begins with."""
        return {"momentum": [torch.zeros_like(weight) for weight in weights.values()]}

    def _held(
        self, matrix: Matrix, part: Tensor, *, update_AB: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of a matrix that are held here: views of the weight and of its update."""
        for at, box in stacked(self._holding.boxes[matrix.owner]):
            first = max(matrix.start, box.offset[0])
            last = min(matrix.start + matrix.rows, box.offset[0] + box.size[0])
            if first < last:
                rows_AB = update_AB[first - matrix.start : last - matrix.start]
                held = part[at + first - box.offset[0] : at + last - box.offset[0]]
                yield held, rows_AB.narrow(1, box.offset[1], box.size[1])


def orthogonalise(matrices_NAB: Tensor) -> Tensor:
    """Roughly U V^T of each matrix U S V^T, in bf16, by five quintic Newton-Schulz steps."""
    first, third, fifth = _COEFFICIENTS
    x_NAB = matrices_NAB.bfloat16()
    is_tall = x_NAB.shape[1] > x_NAB.shape[2]
    if is_tall:
        x_NAB = x_NAB.mT
    x_NAB = x_NAB / x_NAB.norm(dim=(1, 2), keepdim=True).clamp(min=_EPSILON)
    for _ in range(_ITERATIONS):
        gram_NAA = x_NAB @ x_NAB.mT
        polynomial_NAA = torch.baddbmm(gram_NAA, gram_NAA, gram_NAA, beta=third, alpha=fifth)
        x_NAB = torch.baddbmm(x_NAB, polynomial_NAA, x_NAB, beta=first)
    return x_NAB.mT if is_tall else x_NAB
