# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients in another precision than the passes'."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

from tandem.engines.gradient_sums import GradientSums
from tandem.models.gradient_sum import linear
from tandem.models.operators import TORCH


def layers(num: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(num)))


def sums_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> GradientSums:
    named = dict(module.named_parameters())
    return GradientSums(named, dict.fromkeys(named, dtype), operators=TORCH)


def backward(module: nn.Module, rows: Tensor) -> None:
    module(rows).float().square().sum().backward()


def test_sums_are_those_of_the_gradients_one_after_the_other() -> None:
    batches = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain, summed = layers(), layers()
    sums = sums_of(summed)
    sums.begin()
    wanted: dict[str, Tensor] = {}
    for batch in batches:
        backward(plain, batch)
        backward(summed, batch)
        for name, weight in plain.named_parameters():
            assert weight.grad is not None
            wanted[name] = wanted.get(name, torch.zeros(weight.shape)) + weight.grad.float()
        plain.zero_grad()
    for name, wanted_sum in wanted.items():
        found = sums.totals()[name]
        assert found.dtype == torch.float32
        assert torch.equal(found, wanted_sum)


def test_a_gradient_is_freed_before_the_next_one_is_computed() -> None:
    module = layers()
    sums = sums_of(module)
    sums.begin()
    others: list[int] = []

    def count(_: Tensor) -> None:
        others.append(sum(one.grad is not None for one in module.parameters()))

    for parameter in module.parameters():  # after the hook of the sums
        parameter.register_post_accumulate_grad_hook(count)
    backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    assert others == [0] * 8


def test_a_frozen_weight_has_no_sum_and_sums_begin_with_zeros() -> None:
    module = layers(2)
    frozen = module[0].weight.requires_grad_(False)
    sums = sums_of(module)
    sums.begin()
    backward(module[1:], torch.ones(2, 8, dtype=torch.bfloat16))
    assert frozen.grad is None
    assert set(sums.totals()) == {"0.bias", "1.weight", "1.bias"}
    assert not sums.totals()["0.bias"].any()
    first = sums.totals()["1.weight"].clone()
    assert first.any()
    sums.drop()
    with pytest.raises(AssertionError, match="no sum has begun"):
        sums.totals()
    sums.begin()
    assert not sums.totals()["1.weight"].any()
    backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    assert not torch.equal(sums.totals()["1.weight"], first), "the rows went through one layer"


def small_integers(*sizes: int, seed: int) -> Tensor:
    """Return -1, 0 and 1 in bf16.

    What the tests compute from them is at most 512 and even, or at most 256, and therefore exact in
    bf16, on every processor and in every order.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, sizes, generator=generator).bfloat16()


class Twice(nn.Module):
    """A map by ``gradient_sum.linear``, whose weight the output also reads as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(small_integers(4, 8, seed=0))
        self.bias = nn.Parameter(small_integers(4, seed=1))

    def forward(self, rows: Tensor) -> Tensor:
        own = linear(rows, self.weight, bias_N=self.bias)
        return own + self.weight.sum(1)


def test_products_and_other_gradients_of_a_weight_come_to_one_sum() -> None:
    rows = small_integers(2, 5, 8, seed=2)
    plain, summed = Twice().double(), Twice()
    sums = sums_of(summed)
    sums.begin()
    for batch in rows:
        double = batch.double().requires_grad_()
        plain(double).square().sum().backward()
        batch.requires_grad_()
        backward(summed, batch)
        assert batch.grad is not None and double.grad is not None
        assert torch.equal(batch.grad.double(), double.grad)
    assert summed.weight.grad is None and summed.bias.grad is None
    for name, weight in plain.named_parameters():
        assert weight.grad is not None
        assert torch.equal(sums.totals()[name].double(), weight.grad)


def test_a_product_adds_the_same_as_a_gradient_and_leaves_the_weights_alone() -> None:
    rows = small_integers(5, 8, seed=2)
    plain, summed = Twice(), Twice()
    sums = sums_of(summed)
    sums.begin()
    backward(plain, rows)
    before = {name: one.clone() for name, one in summed.named_parameters()}
    backward(summed, rows)
    assert plain.bias.grad is not None
    assert plain.weight.grad is not None
    assert torch.equal(sums.totals()["bias"], plain.bias.grad.float())
    assert torch.equal(sums.totals()["weight"], plain.weight.grad.float())
    assert all(torch.equal(one, before[name]) for name, one in summed.named_parameters())


def test_a_frozen_map_computes_only_the_gradient_of_its_input() -> None:
    module = Twice()
    module.weight.requires_grad_(False)
    sums = sums_of(module)
    sums.begin()
    rows = small_integers(5, 8, seed=2).requires_grad_()
    linear(rows, module.weight, bias_N=module.bias).sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad, module.weight.sum(0).expand(5, 8))
    assert set(sums.totals()) == {"bias"}


@pytest.mark.parametrize("is_trained", [False, True])
def test_weights_are_freed_without_the_collector(is_trained: bool) -> None:
    module = layers(1)
    sums = sums_of(module)
    if is_trained:
        sums.begin()
        backward(module, torch.ones(2, 8, dtype=torch.bfloat16))
    weight = weakref.ref(module[0].weight)
    gc.disable()
    try:
        del module, sums
        assert weight() is None
    finally:
        gc.enable()
