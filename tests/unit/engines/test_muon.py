# SPDX-License-Identifier: Apache-2.0
"""Muon against torch's own, on whole and on fused parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tandem.engines.muon import Matrix, Muon, orthogonalise
from tandem.engines.shards import unsharded_map

SHAPES = ((24, 16), (16, 16), (8, 32), (24, 16))


def _tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {str(i): torch.randn(shape, generator=generator) for i, shape in enumerate(SHAPES)}


def _muon(weights: dict[str, Tensor], rows: int | None = None) -> Muon:
    """``rows``: of each of the matrices on top of each other; all of a weight if not given."""
    matrices = [
        Matrix(name, start, rows=rows or len(weight), columns=weight.shape[1])
        for name, weight in weights.items()
        for start in range(0, len(weight), rows or len(weight))
    ]
    return Muon(matrices, weight_decay=0.1, shard_map=unsharded_map(weights))


def test_steps_equal_torchs() -> None:
    ours = _tensors(4)
    theirs = [nn.Parameter(weight.clone()) for weight in ours.values()]
    optimizer = _muon(ours)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")
    for step in range(4):
        gradients = _tensors(step)
        for parameter, gradient in zip(theirs, gradients.values(), strict=True):
            parameter.grad = gradient.clone()
        optimizer.step(ours, gradients, rate=0.02)
        reference.step()
    for our, their in zip(ours.values(), theirs, strict=True):
        # One step moves an entry by some 5e-3; bf16 sums differ in order.
        torch.testing.assert_close(our, their.detach(), rtol=0, atol=4e-4)


def test_parts_of_a_fused_parameter_are_orthogonalised_apart() -> None:
    parts = {name: torch.randn(16, 16) for name in ("first", "second")}
    fused = {"both": torch.cat(list(parts.values()))}
    apart, together = _muon(parts), _muon(fused, rows=16)
    for _ in range(3):
        gradients = {name: torch.randn(16, 16) for name in parts}
        apart.step(parts, gradients, rate=0.02)
        together.step(fused, {"both": torch.cat(list(gradients.values()))}, rate=0.02)
    torch.testing.assert_close(fused["both"], torch.cat(list(parts.values())), rtol=0, atol=0)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in SHAPES:
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape)).float())
        assert float(singular.min()) > 0.4 and float(singular.max()) < 1.4
