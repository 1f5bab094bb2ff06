# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024): momentum, orthogonalised by Newton-Schulz iterations; matrices only.

The update of ``torch.optim.Muon`` with ``adjust_lr_fn="original"``, in two points different: a
parameter may hold several matrices on top of each other, each of which is orthogonalised for
itself, and matrices of equal shape go through the iteration as one batch, which is several times as
fast for small models.

Shapes: N matrices of one shape, A rows, B columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tandem.engines.adamw import Moments, gradient_of

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5
_EPSILON = 1e-7


@dataclass(frozen=True, slots=True)
class Matrix:
    """Rows ``start .. start + rows`` of a parameter: one linear map."""

    owner: nn.Parameter
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor shaped like the owner, (A, B)."""
        return tensor[self.start : self.start + self.rows]


class Muon:
    """Nesterov momentum and decoupled weight decay. The matrices of one owner must cover it, and
    every owner must have a gradient when a step is taken."""

    def __init__(self, matrices: Sequence[Matrix], *, weight_decay: float) -> None:
        self._owners = list({id(matrix.owner): matrix.owner for matrix in matrices}.values())
        self._by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            self._by_shape[matrix.rows, matrix.owner.shape[1]].append(matrix)
        self._weight_decay = weight_decay
        self.moments: Moments = {}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Update the owners from their gradients."""
        if not self.moments:
            self.moments = {"momentum": [torch.zeros_like(owner) for owner in self._owners]}
        updates: dict[int, Tensor] = {}
        for owner, momentum in zip(self._owners, self.moments["momentum"], strict=True):
            gradient = gradient_of(owner)
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            updates[id(owner)] = gradient.lerp(momentum, _MOMENTUM)
        for (rows, columns), matrices in self._by_shape.items():
            stacked_NAB = torch.stack([matrix.of(updates[id(matrix.owner)]) for matrix in matrices])
            adjusted = rate * math.sqrt(max(1.0, rows / columns))
            for matrix, update_AB in zip(matrices, orthogonalise(stacked_NAB), strict=True):
                weight_AB = matrix.of(matrix.owner)
                weight_AB.mul_(1 - rate * self._weight_decay).sub_(update_AB, alpha=adjusted)


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
