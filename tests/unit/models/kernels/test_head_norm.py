# SPDX-License-Identifier: Apache-2.0
"""The fused norms of queries and keys against torch's in fp64: results and gradients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tandem.models.operators import TORCH, Operators

EPS = 1e-6
# Tokens, queries, keys, head dimension: one row, rows that fill no program, several programs that
# compute several times, a head that is no power of two.
SHAPES = [(1, 1, 1, 8), (5, 4, 2, 16), (40, 3, 1, 128), (7, 2, 2, 96)]
# bf16 keeps 8 bits. The interpreter cuts the others off where a device rounds to nearest.
ONE_ROUNDING = {"rtol": 2.0**-7, "atol": 1e-5}
CLOSE = {"rtol": 2e-6, "atol": 4e-6}


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch, fused: Operators) -> None:
    """Let programs of the backward pass compute several times."""
    assert fused is not TORCH
    monkeypatch.setattr("tandem.models.kernels.head_norm._MAX_PROGRAMS", 2)


def run(
    operators: Operators, inputs: Sequence[Tensor], *, num_queries: int, grad_TME: Tensor
) -> tuple[Tensor, ...]:
    """Return the norms, and the gradients of heads and weights."""
    leaves = [one.detach().requires_grad_() for one in inputs]
    x_TME, q_weight_E, k_weight_E = leaves
    y_TME = operators.norm_heads(
        x_TME, num_queries, q_weight_E=q_weight_E, k_weight_E=k_weight_E, eps=EPS
    )
    return y_TME, *torch.autograd.grad(y_TME, leaves, grad_TME)


def draw(
    shape: tuple[int, int, int, int], *, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """Return heads, which are a slice of a larger tensor, with both weights; and a gradient."""
    tokens, queries, keys, head_dim = shape
    x_TME = torch.randn(tokens, queries + 2 * keys, head_dim)[:, : queries + keys]
    weights = [1 + 0.3 * torch.randn(head_dim) for _ in range(2)]
    inputs = [one.to(device, dtype) for one in (x_TME, *weights)]
    return inputs, torch.randn(x_TME.shape).to(device, dtype)


def check_sums(our_E: Tensor, their_E: Tensor, *, num_terms: int, bound: float) -> None:
    """Compare sums of products of numbers of about 1, which may cancel."""
    size = num_terms**0.5 + their_E.abs().max()
    assert (our_E.double() - their_E).abs().max() <= bound * size


@pytest.mark.parametrize("shape", SHAPES)
def test_fp32_equals_torch(
    shape: tuple[int, int, int, int], fused: Operators, device: torch.device
) -> None:
    inputs, grad_TME = draw(shape, dtype=torch.float32, device=device)
    y_TME, grad_x_TME, *of_weights = run(fused, inputs, num_queries=shape[1], grad_TME=grad_TME)
    exact, exact_x, *exact_weights = run(
        TORCH, [x.double() for x in inputs], num_queries=shape[1], grad_TME=grad_TME.double()
    )
    torch.testing.assert_close(y_TME.double(), exact, **CLOSE)
    # A gradient is a difference of numbers of its size times the largest 1 / rms.
    largest = inputs[0].double().square().mean(-1).rsqrt().max()
    torch.testing.assert_close(grad_x_TME.double(), exact_x, rtol=2e-6, atol=4e-6 * float(largest))
    for our_E, their_E in zip(of_weights, exact_weights, strict=True):
        check_sums(our_E, their_E, num_terms=shape[0] * shape[1], bound=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_bf16_rounds_once(
    shape: tuple[int, int, int, int], fused: Operators, device: torch.device
) -> None:
    inputs, grad_TME = draw(shape, dtype=torch.bfloat16, device=device)
    ours = run(fused, inputs, num_queries=shape[1], grad_TME=grad_TME)
    theirs = run(
        TORCH, [x.double() for x in inputs], num_queries=shape[1], grad_TME=grad_TME.double()
    )
    assert all(one.dtype == torch.bfloat16 for one in ours)
    torch.testing.assert_close(ours[0].double(), theirs[0], **ONE_ROUNDING)
    # The difference in a gradient is computed in fp32, with errors of its terms' sizes.
    largest = inputs[0].double().square().mean(-1).rsqrt().max()
    bound = {"rtol": 2.0**-7, "atol": 1e-5 * float(largest)}
    torch.testing.assert_close(ours[1].double(), theirs[1], **bound)
    for our_E, their_E in zip(ours[2:], theirs[2:], strict=True):
        check_sums(our_E, their_E, num_terms=shape[0] * shape[1], bound=2.0**-7)


def test_sums_of_weights_are_in_fp32_whatever_torchs_default(
    fused: Operators, device: torch.device
) -> None:
    inputs, grad_TME = draw((40, 3, 1, 128), dtype=torch.float32, device=device)
    plain = run(fused, inputs, num_queries=3, grad_TME=grad_TME)
    torch.set_default_dtype(torch.bfloat16)
    try:
        ours = run(fused, inputs, num_queries=3, grad_TME=grad_TME)
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, ours, plain))


def test_heads_in_another_order_of_memory(fused: Operators, device: torch.device) -> None:
    inputs, grad_TME = draw((6, 2, 1, 16), dtype=torch.float32, device=device)
    turned = [inputs[0].transpose(1, 2).contiguous().transpose(1, 2), *inputs[1:]]
    assert turned[0].stride(2) != 1
    ours = run(fused, turned, num_queries=2, grad_TME=grad_TME.flip(0))
    plain = run(fused, inputs, num_queries=2, grad_TME=grad_TME.flip(0))
    assert all(map(torch.equal, ours, plain))


def test_no_tokens_and_no_gradients(fused: Operators, device: torch.device) -> None:
    inputs, grad_TME = draw((0, 2, 1, 16), dtype=torch.float32, device=device)
    y_TME, grad_x_TME, of_q_E, of_k_E = run(fused, inputs, num_queries=2, grad_TME=grad_TME)
    assert y_TME.shape == grad_x_TME.shape == (0, 3, 16)
    assert not of_q_E.any() and not of_k_E.any()
    (x_TME, q_weight_E, k_weight_E), _ = draw((3, 2, 1, 16), dtype=torch.float32, device=device)
    weights = {"q_weight_E": q_weight_E.requires_grad_(), "k_weight_E": k_weight_E}
    with torch.no_grad():
        lean_TME = fused.norm_heads(x_TME, 2, **weights, eps=EPS)
    assert lean_TME.grad_fn is None
    assert torch.equal(lean_TME, fused.norm_heads(x_TME, 2, **weights, eps=EPS))
