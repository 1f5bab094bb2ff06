# SPDX-License-Identifier: Apache-2.0
"""Muon against torch's own, on whole and on fused parameters."""

from __future__ import annotations

import torch
from torch import nn

from tandem.engines.muon import Matrix, Muon, orthogonalise

SHAPES = ((24, 16), (16, 16), (8, 32), (24, 16))


def _parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def _set_gradients(parameters: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_steps_equal_torchs() -> None:
    ours, theirs = _parameters(), _parameters()
    optimizer = Muon([Matrix(parameter, 0, len(parameter)) for parameter in ours], weight_decay=0.1)
    reference = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="original")
    for step in range(4):
        _set_gradients(ours, step)
        _set_gradients(theirs, step)
        optimizer.step(0.02)
        reference.step()
    for our, their in zip(ours, theirs, strict=True):
        # One step moves an entry by some 5e-3; bf16 sums differ in order.
        torch.testing.assert_close(our, their, rtol=0, atol=4e-4)


def test_parts_of_a_fused_parameter_are_orthogonalised_apart() -> None:
    parts = _parameters()[1:2] + _parameters()[1:2]
    fused = nn.Parameter(torch.cat([part.detach() for part in parts]))
    apart = Muon([Matrix(part, 0, 16) for part in parts], weight_decay=0.1)
    together = Muon([Matrix(fused, 0, 16), Matrix(fused, 16, 16)], weight_decay=0.1)
    for step in range(3):
        _set_gradients(parts, step)
        fused.grad = torch.cat([part.grad for part in parts if part.grad is not None])
        apart.step(0.02)
        together.step(0.02)
    torch.testing.assert_close(fused, torch.cat(parts), rtol=0, atol=0)


def test_orthogonalised_matrices_have_singular_values_near_one() -> None:
    for shape in SHAPES:
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(3, *shape)).float())
        assert float(singular.min()) > 0.4 and float(singular.max()) < 1.4
