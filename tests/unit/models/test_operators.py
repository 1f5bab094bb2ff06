# SPDX-License-Identifier: Apache-2.0
"""The torch operators and their hand-written gradients against plain formulas."""

import pytest
import torch
from torch.nn import functional

from tandem.models.operators import TORCH

TOKENS, HIDDEN, EPS = 7, 12, 1e-2


def draw(*shapes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def plain_add_norm(x_TD, delta_TD, weight_D):
    sum_TD = x_TD if delta_TD is None else x_TD + delta_TD
    wide_TD = sum_TD.to(torch.promote_types(sum_TD.dtype, torch.float32))
    normed_TD = wide_TD * (wide_TD.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return (normed_TD * weight_D).to(sum_TD.dtype), sum_TD


def plain_gate(gate_up_T2F):
    gate_TF, up_TF = gate_up_T2F.chunk(2, -1)
    return functional.silu(gate_TF) * up_TF


def norm_inputs(dtype=torch.float64):
    return draw((TOKENS, HIDDEN), (TOKENS, HIDDEN), (HIDDEN,), dtype=dtype)


@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
def test_add_norm_values_and_gradients(dtype, tolerance, with_delta):
    x_TD, delta_TD, weight_D = norm_inputs(dtype)
    inputs = (x_TD, delta_TD, weight_D) if with_delta else (x_TD, weight_D)
    delta_TD = delta_TD if with_delta else None
    ours = TORCH.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    plain = plain_add_norm(x_TD, delta_TD, weight_D)
    assert [part.dtype for part in ours] == [dtype, dtype]
    torch.testing.assert_close(ours, plain, rtol=tolerance, atol=tolerance)
    weights = draw((TOKENS, HIDDEN), (TOKENS, HIDDEN), dtype=dtype)
    grads, expected = (
        torch.autograd.grad(sum((a * b).sum() for a, b in zip(parts, weights, strict=True)), inputs)
        for parts in (ours, plain)
    )
    torch.testing.assert_close(grads, expected, rtol=tolerance, atol=10 * tolerance)


def test_add_norm_of_which_only_one_result_is_used():
    x_TD, delta_TD, weight_D = norm_inputs()
    normed_TD, sum_TD = TORCH.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    expected = torch.autograd.grad(plain_add_norm(x_TD, delta_TD, weight_D)[0].sum(), x_TD)
    torch.testing.assert_close(torch.autograd.grad(normed_TD.sum(), x_TD), expected)
    _, sum_TD = TORCH.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    assert torch.equal(torch.autograd.grad(sum_TD.sum(), delta_TD)[0], torch.ones_like(delta_TD))


def test_gate_values_and_gradients():
    (gate_up_T2F,) = draw((TOKENS, 2 * HIDDEN))
    torch.testing.assert_close(TORCH.gate(gate_up_T2F), plain_gate(gate_up_T2F))
    assert torch.autograd.gradcheck(TORCH.gate, gate_up_T2F)


def test_results_without_gradients_are_the_same():
    x_TD, delta_TD, weight_D = norm_inputs(torch.float32)
    with_grad = TORCH.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
    (gate_up_T2F,) = draw((TOKENS, 2 * HIDDEN), dtype=torch.float32)
    gated_TF = TORCH.gate(gate_up_T2F)
    with torch.inference_mode():
        without = TORCH.add_norm(x_TD, delta_TD, weight_D=weight_D, eps=EPS)
        assert all(torch.equal(a, b) for a, b in zip(with_grad, without, strict=True))
        assert torch.equal(TORCH.gate(gate_up_T2F), gated_TF)
