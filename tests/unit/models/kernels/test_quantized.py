# SPDX-License-Identifier: Apache-2.0
"""Fused operators of fp8 decoders against those of torch: scales, sums and dequantized numbers."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from tandem.models.operators import TORCH
from tandem.models.quantized_operators import (
    HeadLayout,
    Product,
    QuantizedTokens,
    empty_weight,
    multiply,
    quantize_weight,
)

EPS = 1e-6
THEIRS = TORCH.quantized
SCALES = {"rtol": 1e-5, "atol": 0.0}
ONE_ROUNDING = {"rtol": 2.0**-7, "atol": 1e-5}


@pytest.fixture
def ours(fused):
    """The kernels under test."""
    return fused.quantized


def assert_same_quantized(ours: QuantizedTokens, theirs: QuantizedTokens) -> None:
    """Equal scales, and numbers that differ by a step of fp8 at most.

    A step is an eighth of a number of e4m3, and 2**-9 for the smallest. Numbers between two steps
    may be rounded to either, because a kernel multiplies by the inverse of the scale.
    """
    torch.testing.assert_close(ours.scale_T, theirs.scale_T, **SCALES)
    one, other = (x.values_TK.float() for x in (ours, theirs))
    torch.testing.assert_close(one, other, rtol=0.125, atol=2.0**-9)


def product(num_tokens: int, columns: int, device: torch.device) -> Product:
    """Return a random product whose scales spread over two orders of magnitude."""
    raw_TN = torch.randn(num_tokens, columns)
    scale_T = torch.rand(num_tokens) * 2 + 0.02
    return Product(raw_TN.to(device, torch.bfloat16), scale_T.to(device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_lose_a_sixteenth_at_most(dtype, device):
    weight_NK = torch.randn(48, 32).to(device, dtype)
    weight_NK[3, 5] = -40.0
    weight = empty_weight(weight_NK)
    quantize_weight(weight_NK, weight)
    back_NK = weight.values_NK.float() * weight.scale
    # Half a step of e4m3 and the rounding of the scaled number; below 2**-6, steps are 2**-9.
    bound_NK = weight_NK.float().abs() * (2.0**-4 + 2.0**-7) + weight.scale * 2.0**-10
    assert ((back_NK - weight_NK.float()).abs() <= bound_NK).all()
    assert weight.values_NK[3, 5].item() == -448.0


def test_zeros_stay_zero(ours, device):
    zeros_NK = torch.zeros(2, 16, device=device)
    weight = empty_weight(zeros_NK)
    quantize_weight(zeros_NK, weight)
    assert not weight.values_NK.float().any() and weight.scale > 0
    h, _ = ours.add_norm(zeros_NK, None, weight_D=torch.ones(16, device=device), eps=EPS)
    assert not h.values_TK.float().any() and (h.scale_T > 0).all()


@pytest.mark.parametrize("kind", ["nothing", "tensor", "product"])
@pytest.mark.parametrize("hidden", [16, 896])
def test_add_norm(kind, hidden, ours, device):
    x_TD = torch.randn(3, hidden, device=device)
    weight_D = torch.randn(hidden).to(device, torch.bfloat16)
    plain = torch.randn(3, hidden).to(device, torch.bfloat16)
    delta = {"nothing": None, "tensor": plain, "product": product(3, hidden, device)}[kind]
    (h, sum_TD), (their_h, their_sum_TD) = (
        operators.add_norm(x_TD, delta, weight_D=weight_D, eps=EPS) for operators in (ours, THEIRS)
    )
    torch.testing.assert_close(sum_TD, their_sum_TD)
    assert_same_quantized(h, their_h)


def test_last_norm(ours, device):
    x_TD, delta = torch.randn(3, 48, device=device), product(3, 48, device)
    weight_D = torch.randn(48).to(device, torch.bfloat16)
    one, other = (
        operators.last_norm(x_TD, delta, weight_D=weight_D, eps=EPS) for operators in (ours, THEIRS)
    )
    assert one.dtype == torch.bfloat16
    torch.testing.assert_close(one.float(), other.float(), **ONE_ROUNDING)


def layout(device: torch.device, *, biased: bool, normed: bool) -> HeadLayout:
    """Return three query heads and one key/value head of 16."""
    draw = partial(torch.randn, device=device)
    norms = {"q_norm_E": draw(16), "k_norm_E": draw(16)} if normed else {}
    plain = HeadLayout(3, 1, 16, draw(5 * 16) if biased else None, None, None, EPS)
    return replace(plain, **norms)


@pytest.mark.parametrize(("biased", "normed"), [(True, False), (False, True), (True, True)])
def test_heads(biased, normed, ours, device):
    own = layout(device, biased=biased, normed=normed)
    angle_T1E = torch.randn(7, 1, 16, device=device)
    angles = (angle_T1E.cos(), angle_T1E.sin())
    one, other = (
        operators.heads(raw, own, angles=angles)
        for raw in [product(7, 5 * 16, device)]
        for operators in (ours, THEIRS)
    )
    assert one.shape == (7, 5, 16)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_columns", [1024, 4096])
@pytest.mark.parametrize("inner", [16, 2064])
def test_gate(max_columns, inner, ours, device):
    raw = product(2, 2 * inner, device)
    gate = partial(ours.gate, max_columns=max_columns)
    assert_same_quantized(gate(raw), THEIRS.gate(raw))


def test_a_product_is_that_of_the_dequantized_matrices(ours, device):
    x_TK, weight_NK = torch.randn(5, 64, device=device), torch.randn(32, 64, device=device)
    ones_K = torch.ones(64, device=device)
    x, _ = ours.add_norm(x_TK, None, weight_D=ones_K, eps=EPS)
    weight = empty_weight(weight_NK)
    quantize_weight(weight_NK, weight)
    exact_TN = (x.values_TK.double() * x.scale_T.double()[:, None]) @ (
        weight.values_NK.double() * weight.scale.double()
    ).T
    actual_TN = multiply(x, weight).dequantize().double()
    # The product is rounded to bf16, and a device's tensor cores keep 14 bits of each sum.
    error = (actual_TN - exact_TN).norm() / exact_TN.norm()
    assert error < 5e-3
