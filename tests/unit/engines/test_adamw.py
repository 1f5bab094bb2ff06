# SPDX-License-Identifier: Apache-2.0
"""AdamW against torch's own, its moments in half precision, and their rounding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tandem.engines import adamw
from tandem.engines.adamw import AdamW, _chunks, round_stochastically

NUM_DRAWS = 4000


@pytest.mark.parametrize(
    ("is_coupled", "torchs"), [(False, torch.optim.AdamW), (True, torch.optim.Adam)]
)
def test_steps_equal_torchs_bit_by_bit(
    is_coupled: bool, torchs: type[torch.optim.Optimizer]
) -> None:
    shapes = {"matrix": (5, 7), "vector": (9,), "scalar": (), "nothing": (0, 7)}
    ours = {name: torch.ones(shape) for name, shape in shapes.items()}
    theirs = {name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()}
    settings = {"betas": (0.8, 0.95), "weight_decay": 0.2}
    optimizer = AdamW(**settings, stored=torch.float32, is_coupled=is_coupled)
    reference = torchs(theirs.values(), **settings, fused=True)
    for rate in (0.1, 0.03, 0.0, 0.2):
        reference.param_groups[0]["lr"] = rate
        gradients = {name: torch.randn(shape) for name, shape in shapes.items()}
        for name, parameter in theirs.items():
            parameter.grad = gradients[name].clone()
        optimizer.step(ours, gradients, rate=rate)
        reference.step()
    for name, parameter in theirs.items():
        torch.testing.assert_close(ours[name], parameter.detach(), rtol=0, atol=0)


def _halved() -> AdamW:
    return AdamW(betas=(0.9, 0.999), weight_decay=0.0, stored=torch.float32, half_moments=True)


def _gradients(step: int) -> dict[str, torch.Tensor]:
    """Return large gradients, then small ones: the second moment has to forget the first."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.rand(16, 32, generator=generator) + 0.5
    return {"x": noise * (30.0 if step == 0 else 0.1)}


def _late_way(optimizer: AdamW, *, to_nearest: bool = False) -> torch.Tensor:
    """Return the distance that the weights move in the last 300 of 2000 steps."""
    weights = {"x": torch.zeros(16, 32)}
    for step in range(2000):
        if step == 1700:
            weights["x"].zero_()
        optimizer.step(weights, _gradients(step), rate=1e-3)
        if to_nearest:
            for name in ("exp_avg", "exp_avg_sq"):
                parts = optimizer.moments[name]
                optimizer.moments[name] = [part.bfloat16().float() for part in parts]
    return weights["x"]


def test_half_moments_learn_as_whole_ones_do_and_rounding_to_the_nearest_does_not() -> None:
    expected, stalled = (
        _late_way(
            AdamW(betas=(0.9, 0.999), weight_decay=0.0, stored=torch.float32), to_nearest=nearest
        )
        for nearest in (False, True)
    )
    found = _late_way(_halved())
    torch.testing.assert_close(found.mean(), expected.mean(), rtol=5e-3, atol=0)
    torch.testing.assert_close(found, expected, rtol=0.15, atol=0)
    assert float(stalled.mean() / expected.mean()) < 0.5


def test_half_moments_take_half_the_memory() -> None:
    weights = {"x": torch.ones(40, 10), "y": torch.ones(7)}
    gradients = {name: torch.ones_like(weight) for name, weight in weights.items()}
    taken = []
    for half in (False, True):
        optimizer = AdamW(
            betas=(0.9, 0.999), weight_decay=0.0, stored=torch.float32, half_moments=half
        )
        optimizer.step(weights, gradients, rate=0.0)
        optimizer.step(weights, gradients, rate=0.0)
        moments = (*optimizer.moments["exp_avg"], *optimizer.moments["exp_avg_sq"])
        taken.append(sum(part.nbytes for part in moments))
    assert taken[1] * 2 == taken[0] == 2 * 4 * 407


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
def test_the_first_step_with_half_moments_is_that_with_whole_ones(stored: torch.dtype) -> None:
    """Check the step before which only the weights have been rounded."""
    shapes = {"matrix": (5, 7), "vector": (9,), "nothing": (0, 7), "transposed": (4, 3)}
    start = {name: torch.randn(shape) for name, shape in shapes.items()}
    gradients = {name: torch.randn(shape).to(stored) for name, shape in shapes.items()}
    gradients["transposed"] = torch.randn(3, 4).to(stored).T
    found = []
    for half in (True, False):
        dtype = stored if half else torch.float32
        weights = {name: weight.to(stored).to(dtype) for name, weight in start.items()}
        own = {name: gradient.to(dtype) for name, gradient in gradients.items()}
        optimizer = AdamW(betas=(0.8, 0.95), weight_decay=0.2, stored=dtype, half_moments=half)
        optimizer.step(weights, own, rate=0.1)
        found.append(weights)
    for name in shapes:
        assert torch.equal(found[0][name], found[1][name].to(stored)), name


def test_a_copy_of_half_moments_goes_on_bit_by_bit_and_from_whole_ones_too() -> None:
    weights = {"x": torch.zeros(16, 32)}
    first, second, other = _halved(), _halved(), _halved()
    for step in range(3):
        first.step(weights, _gradients(step), rate=1e-2)
    copied = {"x": weights["x"].clone()}
    second.adopt({name: [x.clone() for x in group] for name, group in first.moments.items()})
    for step in range(3, 6):
        first.step(weights, _gradients(step), rate=1e-2)
        second.step(copied, _gradients(step), rate=1e-2)
    assert torch.equal(weights["x"], copied["x"])
    assert torch.equal(first.moments["exp_avg"][0], second.moments["exp_avg"][0])
    other.adopt({name: [x.float() for x in group] for name, group in first.moments.items()})
    other.step(copied, _gradients(6), rate=1e-2)
    assert other.moments["exp_avg_sq"][0].dtype == torch.bfloat16


def test_chunks_cover_everything_once_within_the_limit() -> None:
    sizes = (3, 0, 10, 7, 1, 25)
    columns = [[torch.arange(size) + 100 * number for size in sizes] for number in range(4)]
    lists = list(_chunks(columns, limit=10))
    assert [sum(len(run[0]) for _, run in runs) for runs in lists] == [3, 10, 8, 10, 10, 5]
    assert [[index for index, _ in runs] for runs in lists] == [[0], [2], [3, 4], [5], [5], [5]]
    for number, column in enumerate(columns):
        found = torch.cat([run[number] for runs in lists for _, run in runs])
        assert torch.equal(found, torch.cat(column))


@pytest.mark.parametrize("first", [0, 5, 7, 33])
def test_half_moments_of_a_weight_do_not_depend_on_the_weights_before_it(
    monkeypatch: pytest.MonkeyPatch, first: int
) -> None:
    """Ranks may hold the same part of one weight, and parts of other sizes of another."""
    monkeypatch.setattr(adamw, "CHUNK_NUMBERS", 10)
    found: list[Tensor] = []
    for size in (7, first):
        optimizer = _halved()
        weights = {"experts": torch.zeros(size), "norm": torch.zeros(25)}
        for step in range(2):
            noise = torch.rand(25, generator=torch.Generator().manual_seed(step))
            gradients = {"experts": torch.ones(size), "norm": noise}
            optimizer.step(weights, gradients, rate=0.1)
        found.append(weights["norm"])
    assert torch.equal(found[0], found[1])


def test_weights_of_one_step_are_rounded_with_different_noise() -> None:
    optimizer = _halved()
    weights = {"x": torch.zeros(256), "y": torch.zeros(256)}
    gradients = {name: torch.full((256,), 1.003) for name in weights}
    optimizer.step(weights, gradients, rate=0.1)
    assert not torch.equal(*optimizer.moments["exp_avg"])


def generator() -> torch.Generator:
    """Return a generator that is the same in every test."""
    return torch.Generator().manual_seed(3)


def numbers() -> Tensor:
    """Return numbers of many magnitudes, denormal ones, and some next to a power of two."""
    x_N = torch.randn(60, generator=generator()) * torch.logspace(-36, 36, 60)
    return torch.cat([x_N, torch.tensor([1e-40, -1e-40, 0.999, -1.999])])


def neighbours(x_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the neighbouring bf16 numbers towards zero and away from it."""
    towards_N = x_N.view(torch.int32) & -65536
    return towards_N.view(torch.float32), (towards_N + 65536).view(torch.float32)


def test_the_mean_is_the_number_itself() -> None:
    """Check the mean. With rounding to the nearest it would stay half a digit away."""
    x_N = numbers()
    draws = round_stochastically(x_N.repeat(NUM_DRAWS), generator()).view(NUM_DRAWS, -1).double()
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
        drawn_N = round_stochastically(x_N, torch.Generator().manual_seed(seed)).float()
        assert bool(((drawn_N == towards_N) | (drawn_N == away_N)).all())


def test_what_bf16_holds_stays() -> None:
    x_N = torch.cat([torch.zeros(3), -torch.zeros(1), numbers().bfloat16().float()])
    drawn_N = round_stochastically(x_N, generator())
    assert drawn_N.dtype == torch.bfloat16
    assert torch.equal(drawn_N.float(), x_N)


def test_the_generator_decides() -> None:
    x_N = torch.randn(1000, generator=generator())
    first, again = (round_stochastically(x_N, generator()) for _ in range(2))
    assert torch.equal(first, again)
    used = generator()
    assert not torch.equal(round_stochastically(x_N, used), round_stochastically(x_N, used))
