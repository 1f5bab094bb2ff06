# SPDX-License-Identifier: Apache-2.0
"""Learning-rate factors against transformers' schedules and verl's extensions of them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers.optimization import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)

from tandem.engines.optim import LearningRateSchedule, warmup_steps


def _schedule(kind: str = "cosine", **changes: float) -> LearningRateSchedule:
    settings = {"warmup_steps": 5, "total_steps": 20, "min_ratio": 0.0, "num_cycles": 0.5}
    return LearningRateSchedule(kind=kind, **(settings | changes))


def _factors_of(scheduler: torch.optim.lr_scheduler.LRScheduler, count: int) -> list[float]:
    factors: list[float] = []
    for _ in range(count):
        factors.append(scheduler.get_last_lr()[0])
        scheduler.optimizer.step()
        scheduler.step()
    return factors


def _optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)


@pytest.mark.parametrize("num_cycles", [0.5, 1.0, 1.5])
def test_cosine_equals_transformers(num_cycles: float) -> None:
    theirs = get_cosine_schedule_with_warmup(_optimizer(), 5, 20, num_cycles=num_cycles)
    ours = _schedule(num_cycles=num_cycles)
    assert [ours.factor(step) for step in range(20)] == pytest.approx(_factors_of(theirs, 20))


@pytest.mark.parametrize("warmup", [0, 4])
def test_constant_equals_transformers(warmup: int) -> None:
    theirs = get_constant_schedule_with_warmup(_optimizer(), warmup)
    ours = _schedule("constant", warmup_steps=warmup)
    assert [ours.factor(step) for step in range(8)] == pytest.approx(_factors_of(theirs, 8))


def test_cosine_ends_at_the_minimum_ratio() -> None:
    schedule = _schedule(min_ratio=0.1, warmup_steps=0)
    assert schedule.factor(0) == 1.0
    assert schedule.factor(10) == pytest.approx(0.55)
    assert schedule.factor(20) == pytest.approx(0.1)
    quarter = 0.45 * math.cos(math.pi / 4) + 0.55
    assert schedule.factor(5) == pytest.approx(quarter)


def test_warmup_starts_at_zero_and_a_positive_number_of_steps_wins() -> None:
    assert [_schedule().factor(step) for step in (0, 1, 5)] == pytest.approx([0.0, 0.2, 1.0])
    assert warmup_steps(7, 0.5, total_steps=100) == 7
    assert warmup_steps(-1, 0.057, total_steps=100) == 5
    assert warmup_steps(0, 0.1, total_steps=58) == 5
