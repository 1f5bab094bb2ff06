# SPDX-License-Identifier: Apache-2.0
"""Fused sum and norm against the operators of torch in fp64: results and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.models.operators import TORCH, Operators

EPS = 1e-6
SHAPES = [(1, 8), (5, 7), (13, 896), (3, 1536), (2, 8190)]
# bf16 keeps 8 bits. The interpreter cuts the others off where a device rounds to nearest.
ONE_ROUNDING = {"rtol": 2.0**-7, "atol": 1e-5}
CLOSE = {"rtol": 1e-6, "atol": 4e-6}


def draw(num_tokens: int, hidden: int, *, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Return x, delta, weight and the gradients of norm and sum."""
    shapes = [(num_tokens, hidden)] * 2 + [(hidden,)] + [(num_tokens, hidden)] * 2
    return [torch.randn(shape).to(device, dtype) for shape in shapes]


def run(
    operators: Operators, inputs: Sequence[Tensor], *, grads: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return norm, sum, and the gradients of x, delta and weight."""
    x_TD, delta_TD, weight_D = leaves = [x.detach().clone().requires_grad_() for x in inputs]
    outputs = operators.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    return *outputs, *torch.autograd.grad(outputs, leaves, grads)


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_torch(shape, fused, device):
    x_TD, delta_TD, weight_D, *grads = draw(*shape, dtype=torch.float32, device=device)
    inputs = (x_TD, delta_TD, weight_D)
    ours = run(fused, inputs, grads=grads)
    theirs = run(TORCH, [x.double() for x in inputs], grads=[g.double() for g in grads])
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their.float(), **CLOSE)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_rounds_once(shape, fused, device):
    x_TD, delta_TD, weight_D, *grads = draw(*shape, dtype=torch.bfloat16, device=device)
    h_TD, sum_TD, *our_grads = run(fused, (x_TD, delta_TD, weight_D), grads=grads)
    torch.testing.assert_close(sum_TD.double(), x_TD.double() + delta_TD.double(), **ONE_ROUNDING)
    exact = [x.double() for x in (sum_TD, torch.zeros_like(sum_TD), weight_D)]
    their_h_TD, _, *their_grads = run(TORCH, exact, grads=[g.double() for g in grads])
    for our, their in zip((h_TD, *our_grads), (their_h_TD, *their_grads), strict=True):
        assert our.dtype == torch.bfloat16
        torch.testing.assert_close(our.double(), their, **ONE_ROUNDING)


def test_norm_is_of_the_rounded_sum(fused, device):
    x_TD = torch.tensor([[256.0, 0.0]], dtype=torch.bfloat16, device=device)
    delta_TD = torch.tensor([[0.5, 200.0]], dtype=torch.bfloat16, device=device)
    weight_D = torch.ones(2, device=device)
    with torch.no_grad():
        h_TD, sum_TD = fused.add_norm(x_TD, delta_TD, weight_D=weight_D.bfloat16(), eps=EPS)
    assert sum_TD.tolist() == [[256.0, 200.0]]
    exact_TD = TORCH.add_norm(sum_TD.float(), None, weight_D=weight_D, eps=EPS)[0]
    torch.testing.assert_close(h_TD.float(), exact_TD, **ONE_ROUNDING)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_delta_the_sum_is_x(dtype, fused, device):
    x_TD, _, weight_D, *grads = draw(6, 24, dtype=dtype, device=device)
    results = []
    for operators in (fused, TORCH):
        leaves = [x.detach().clone().requires_grad_() for x in (x_TD, weight_D)]
        outputs = operators.add_norm(leaves[0], None, weight_D=leaves[1], eps=EPS)
        assert outputs[1].data_ptr() == leaves[0].data_ptr()
        results.append((*outputs, *torch.autograd.grad(outputs, leaves, grads)))
    tolerance = CLOSE if dtype == torch.float32 else {"rtol": 2.0**-6, "atol": 2.0**-6}
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, **tolerance)


def test_gradient_through_the_norm_alone(fused, device):
    inputs, grad_h_TD = draw(5, 24, dtype=torch.float32, device=device)[:3], None
    results = []
    for operators in (fused, TORCH):
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        h_TD, _ = operators.add_norm(leaves[0], leaves[1], weight_D=leaves[2], eps=EPS)
        grad_h_TD = torch.randn_like(h_TD) if grad_h_TD is None else grad_h_TD
        results.append(torch.autograd.grad(h_TD, leaves, grad_h_TD))
    for our, their in zip(*results, strict=True):
        torch.testing.assert_close(our, their, **CLOSE)


def test_gradient_through_the_sum_alone(fused, device):
    inputs = draw(5, 24, dtype=torch.float32, device=device)
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    _, sum_TD = fused.add_norm(leaves[0], leaves[1], weight_D=leaves[2], eps=EPS)
    grads = torch.autograd.grad(sum_TD, leaves, inputs[3], allow_unused=True)
    assert torch.equal(grads[0], inputs[3])
    assert torch.equal(grads[1], inputs[3])
    assert grads[2] is None


def test_any_layout_of_inputs_and_gradients(fused, device):
    inputs = draw(6, 10, dtype=torch.float32, device=device)
    strided = [x if x.dim() == 1 else x.T.contiguous().T for x in inputs]
    assert not strided[0].is_contiguous()
    compact = run(fused, inputs[:3], grads=inputs[3:])
    for our, their in zip(run(fused, strided[:3], grads=strided[3:]), compact, strict=True):
        assert torch.equal(our, their)
    ones_TD = torch.ones((), device=device).expand(6, 10)
    constant = run(fused, inputs[:3], grads=(ones_TD, ones_TD))
    theirs = run(TORCH, inputs[:3], grads=(ones_TD, ones_TD))
    for our, their in zip(constant, theirs, strict=True):
        torch.testing.assert_close(our, their, **CLOSE)


def test_no_rows(fused, device):
    inputs = draw(0, 24, dtype=torch.float32, device=device)
    h_TD, sum_TD, grad_x_TD, grad_delta_TD, grad_weight_D = run(fused, inputs[:3], grads=inputs[3:])
    for empty_TD in (h_TD, sum_TD, grad_x_TD, grad_delta_TD):
        assert empty_TD.shape == (0, 24)
    assert torch.equal(grad_weight_D, torch.zeros(24, device=device))


def test_without_gradients_the_same_and_nothing_kept(fused, device):
    x_TD, delta_TD, weight_D = draw(5, 24, dtype=torch.float32, device=device)[:3]
    weight_D.requires_grad_()
    kept = fused.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    with torch.no_grad():
        lean = fused.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
        _, sum_TD = fused.add_norm(x_TD, None, weight_D=weight_D, eps=EPS)
    assert sum_TD is x_TD
    for ours, theirs in zip(lean, kept, strict=True):
        assert ours.grad_fn is None
        assert torch.equal(ours, theirs)
