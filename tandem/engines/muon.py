# SPDX-License-Identifier: Apache-2.0
"""Muon (Jordan et al., 2024): momentum, orthogonalised by Newton-Schulz iterations, for matrices
only.

The same update as ``torch.optim.Muon`` with ``adjust_lr_fn="original"``, in two points different: a
parameter may hold several matrices on top of each other, each of which is orthogonalised for
itself, and matrices of equal shape go through the iteration as one batch, which is several times as
fast for small models.

Shapes: A rows, B columns of a matrix, N matrices of one shape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, decoupled weight decay. The matrices of one owner must cover it."""

    def __init__(
        self, matrices: Sequence[Matrix], *, lr: float, weight_decay: float, momentum: float = 0.95
    ) -> None:
        owners = list({id(matrix.owner): matrix.owner for matrix in matrices}.values())
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(owners, defaults)
        by_shape: dict[tuple[int, int], list[Matrix]] = defaultdict(list)
        for matrix in matrices:
            by_shape[matrix.rows, matrix.owner.shape[1]].append(matrix)
        self._by_shape = dict(by_shape)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every owner that has a gradient. ``closure`` is not supported."""
        assert closure is None, "Muon.step takes no closure"
        group = self.param_groups[0]
        updates = {
            id(owner): self._momentum(owner, group["momentum"])
            for owner in group["params"]
            if owner.grad is not None
        }
        for (rows, columns), matrices in self._by_shape.items():
            present = [matrix for matrix in matrices if id(matrix.owner) in updates]
            if not present:
                continue
            stacked = torch.stack([matrix.of(updates[id(matrix.owner)]) for matrix in present])
            rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
            for matrix, update in zip(present, orthogonalise(stacked), strict=True):
                weight = matrix.of(matrix.owner)
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)

    def _momentum(self, owner: nn.Parameter, momentum: float) -> Tensor:
        """The Nesterov update of the owner's gradient."""
        gradient, state = owner.grad, self.state[owner]
        assert gradient is not None, "only owners with a gradient are updated"
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum_buffer"], momentum)


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
