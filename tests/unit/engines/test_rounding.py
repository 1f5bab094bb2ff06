# SPDX-License-Identifier: Apache-2.0
"""Random rounding to bf16: neighbours only, right in the mean, and decided by the generator."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.engines.rounding import round_at_random

NUM_DRAWS = 4000


def generator() -> torch.Generator:
    """The same in every test."""
    return torch.Generator().manual_seed(3)


def numbers() -> Tensor:
    """Of both signs and many magnitudes, denormal ones, and some next to a power of two."""
    x_N = torch.randn(60, generator=generator()) * torch.logspace(-36, 36, 60)
    return torch.cat([x_N, torch.tensor([1e-40, -1e-40, 0.999, -1.999])])


def neighbours(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """The bf16 numbers towards zero and away from it."""
    towards_N = x_N.view(torch.int32) & -65536
    return towards_N.view(torch.float32), (towards_N + 65536).view(torch.float32)


def test_the_mean_is_the_number_itself() -> None:
    """Unlike that of rounding to the nearest, whose mean stays half a digit away."""
    x_N = numbers()
    draws = round_at_random(x_N.repeat(NUM_DRAWS), generator()).view(NUM_DRAWS, -1).double()
    towards_N, away_N = neighbours(x_N)
    spacing_N = (away_N.double() - towards_N.double()).abs()
    error_N = (draws.mean(0) - x_N.double()).abs()
    assert bool((error_N <= 4.5 * spacing_N / 2 / NUM_DRAWS**0.5).all())
    nearest_N = (x_N.bfloat16().double() - x_N.double()).abs()
    assert float((nearest_N / spacing_N).mean()) > 0.15
    assert float((error_N / spacing_N).mean()) < 0.01


def test_only_neighbours_are_drawn() -> None:
    x_N = numbers()
    towards_N, away_N = neighbours(x_N)
    for seed in range(50):
        drawn_N = round_at_random(x_N, torch.Generator().manual_seed(seed)).float()
        assert bool(((drawn_N == towards_N) | (drawn_N == away_N)).all())


def test_what_bf16_holds_stays() -> None:
    x_N = torch.cat([torch.zeros(3), -torch.zeros(1), numbers().bfloat16().float()])
    drawn_N = round_at_random(x_N, generator())
    assert drawn_N.dtype == torch.bfloat16
    assert torch.equal(drawn_N.float(), x_N)


def test_the_generator_decides() -> None:
    x_N = torch.randn(1000, generator=generator())
    first, again = (round_at_random(x_N, generator()) for _ in range(2))
    assert torch.equal(first, again)
    used = generator()
    assert not torch.equal(round_at_random(x_N, used), round_at_random(x_N, used))
