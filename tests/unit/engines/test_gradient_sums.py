# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients in another precision than the passes'."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tandem.engines.gradient_sums import GradientSums
from tandem.models.operators import TORCH


def layers(num: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(num)))


def sums_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> GradientSums:
    named = dict(module.named_parameters())
    return GradientSums(named, dict.fromkeys(named, dtype), add_into=TORCH.add_into)


def backward(module: nn.Module, rows: Tensor) -> None:
    module(rows).float().square().sum().backward()


def test_sums_are_those_of_the_gradients_one_after_the_other() -> None:
    batches = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, summed = layers(), layers()
    sums = sums_of(summed)
    sums.allocate()
    wanted: dict[str, Tensor] = {}
    for batch in batches:
        backward(plain, batch)
        backward(summed, batch)
        for name, weight in plain.named_parameters():
            assert weight.grad is not None
            wanted[name] = wanted.get(name, torch.zeros(weight.shape)) + weight.grad.float()
        plain.zero_grad()
    for name, wanted_sum in wanted.items():
        found = sums.get(name)
        assert found is not None and found.dtype == torch.float32
        assert torch.equal(found, wanted_sum)


def test_a_gradient_is_freed_before_the_next_one_is_computed() -> None:
    module = layers()
    sums = sums_of(module)
    sums.allocate()
    others: list[int] = []

    def count(_: Tensor) -> None:
        others.append(sum(one.grad is not None for one in module.parameters()))

    for parameter in module.parameters():  # after the hook of the sums
        parameter.register_post_accumulate_grad_hook(count)
    backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    assert others == [0] * 8


def test_a_weight_without_gradient_has_no_sum_and_sums_are_dropped() -> None:
    module = layers(2)
    frozen = module[0].weight.requires_grad_(False)
    sums = sums_of(module)
    sums.allocate()
    backward(module[1:], torch.ones(2, 8, dtype=torch.bfloat16))
    assert frozen.grad is None
    assert [sums.get(f"0.{name}") for name in ("weight", "bias")] == [None, None]
    first = sums.get("1.weight")
    assert first is not None
    first = first.clone()
    sums.drop()
    assert sums.get("1.weight") is None
    sums.allocate()
    backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    again = sums.get("1.weight")
    assert again is not None and not torch.equal(again, first), "the rows went through one layer"


@pytest.mark.parametrize("is_trained", [False, True])
def test_weights_are_freed_without_the_collector(is_trained: bool) -> None:
    module = layers(1)
    sums = sums_of(module)
    if is_trained:
        sums.allocate()
        backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    weight = weakref.ref(module[0].weight)
    gc.disable()
    try:
        del module, sums
        assert weight() is None
    finally:
        gc.enable()
