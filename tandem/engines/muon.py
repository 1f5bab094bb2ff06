# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024): momentum, orthogonalised by Newton-Schulz iterations; matrices only.

The update equals ``torch.optim.Muon`` with ``adjust_lr_fn="original"``, with two differences. A
parameter may stack several matrices along the rows, each of which is orthogonalised separately.
Matrices of equal shape are iterated as one batch, which is several times faster for small models.
If a matrix is sharded, every process gathers and orthogonalises it whole.

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
from tandem.engines.shards import ShardMap, with_first_rows

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7


@dataclass(frozen=True, slots=True)
class Matrix:
    """A linear map: rows ``start .. start + rows`` of the unsharded parameter ``owner``.

    Attributes:
        expert: the expert whose rows they are, if the owner has the matrices of all experts.
    """

    owner: str
    start: int
    rows: int
    columns: int
    expert: int | None = None

    def of(self, whole: Tensor) -> Tensor:
        """Return these rows, (A, B), of a tensor shaped like the owner."""
        own = whole if self.expert is None else whole[self.expert]
        return self.of_expert(own)

    def of_expert(self, own: Tensor) -> Tensor:
        """Return these rows, (A, B), of a tensor shaped like the rows of one expert."""
        return own[self.start : self.start + self.rows]


class Muon:
    """An optimizer with Nesterov momentum and decoupled weight decay.

    Args:
        matrices: the matrices of all parameters; they must cover each owner.
        shard_map: the regions of each owner that this process holds.
    """

    def __init__(
        self, matrices: Sequence[Matrix], *, weight_decay: float, shard_map: ShardMap
    ) -> None:
        self._by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            self._by_shape[matrix.rows, matrix.columns].append(matrix)
        self._weight_decay = weight_decay
        self._shard_map = shard_map
        self.moments: Moments = {}

    def adopt(self, moments: Moments) -> None:
        """Restore moments of the same weights."""
        self.moments = moments

    @torch.no_grad()
    def step(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], *, rate: float
    ) -> None:
        """Update the owners in place; collective if they are sharded."""
        self.moments = self.moments or self.zero_moments(weights)
        updates: dict[str, Tensor] = {}
        for name, momentum in zip(weights, self.moments["momentum"], strict=True):
            momentum.lerp_(gradients[name], 1 - _MOMENTUM)
            update = gradients[name].lerp(momentum, _MOMENTUM).bfloat16()
            updates[name] = self._shard_map.gather(name, update)
        for (rows, columns), matrices in self._by_shape.items():
            stacked_NAB = torch.stack([matrix.of(updates[matrix.owner]) for matrix in matrices])
            adjusted = rate * math.sqrt(max(1.0, rows / columns))
            for matrix, update_AB in zip(matrices, orthogonalise(stacked_NAB), strict=True):
                part = weights[matrix.owner]
                for weight, update in self._held(matrix, part, update_AB=update_AB):
                    weight.mul_(1 - rate * self._weight_decay).sub_(update, alpha=adjusted)

    def zero_moments(self, weights: Mapping[str, Tensor]) -> Moments:
        """Return the moments before the first step."""
        return {"momentum": [torch.zeros_like(weight) for weight in weights.values()]}

    def _held(
        self, matrix: Matrix, part: Tensor, *, update_AB: Tensor
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of a matrix that this process holds: views of weight and update."""
        for at, region in with_first_rows(self._shard_map.regions[matrix.owner]):
            if matrix.expert is not None:  # a process has an expert whole, or not at all
                place = matrix.expert - region.offset[0]
                if 0 <= place < region.size[0]:
                    yield matrix.of_expert(part[at + place]), update_AB
                continue
            first = max(matrix.start, region.offset[0])
            last = min(matrix.start + matrix.rows, region.offset[0] + region.size[0])
            if first < last:
                rows_AB = update_AB[first - matrix.start : last - matrix.start]
                held = part[at + first - region.offset[0] : at + last - region.offset[0]]
                yield held, rows_AB.narrow(1, region.offset[1], region.size[1])


def orthogonalise(matrices_NAB: Tensor) -> Tensor:
    """Approximate U V^T of each matrix U S V^T by five quintic Newton-Schulz steps, in bf16."""
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
