# SPDX-License-Identifier: Apache-2.0
"""The fused rotation against torch's in fp64: results, gradients, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.models.operators import TORCH, Angles
from tandem.models.rotary import RopeConfig, Rotary

# T, M, E: more heads than one program takes, several tokens a program, halves of no power of two.
SHAPES = [(1, 2, 64), (3, 40, 128), (19, 3, 64), (5, 3, 80), (4, 5, 6), (2, 3, 256)]
ONE_ROUNDING = {"rtol": 2.0**-7, "atol": 1e-5}
CLOSE = {"rtol": 1e-6, "atol": 2e-6}


def rotary_angles(num_tokens: int, head_dim: int, *, like: Tensor) -> Angles:
    """Return the angles of positions 0, 7, 14 and so on."""
    positions_T = 7 * torch.arange(num_tokens, device=like.device)
    return Rotary(RopeConfig(10_000.0), head_dim).angles(positions_T, like.dtype)


def double(angles: Angles) -> Angles:
    return angles[0].double(), angles[1].double()


def run(operators, x_TME: Tensor, *, angles: Angles, grad_TME: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rotated heads, and the gradient of x."""
    x_TME = x_TME.detach().requires_grad_()
    y_TME = operators.rotate(x_TME, angles)
    return y_TME, *torch.autograd.grad(y_TME, x_TME, grad_TME)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, CLOSE), (torch.bfloat16, ONE_ROUNDING)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, dtype, tolerance, fused, device):
    x_TME, grad_TME = (torch.randn(shape).to(device, dtype) for _ in range(2))
    angles = rotary_angles(shape[0], shape[2], like=x_TME)
    ours = run(fused, x_TME, angles=angles, grad_TME=grad_TME)
    theirs = run(TORCH, x_TME.double(), angles=double(angles), grad_TME=grad_TME.double())
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == dtype
        assert our.is_contiguous()
        torch.testing.assert_close(our.double(), their, **tolerance)


def test_halves_have_angles_of_their_own(fused, device):
    x_TME, grad_TME = (torch.randn(5, 3, 16, device=device) for _ in range(2))
    angles = torch.randn(5, 1, 16, device=device), torch.randn(5, 1, 16, device=device)
    ours = run(fused, x_TME, angles=angles, grad_TME=grad_TME)
    theirs = run(TORCH, x_TME, angles=angles, grad_TME=grad_TME)
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their, **CLOSE)


@pytest.mark.parametrize(
    "view",
    [
        lambda qkv_TME: qkv_TME[:, :5],
        lambda qkv_TME: qkv_TME[:, 2:6],
        lambda qkv_TME: qkv_TME[::2, 1::3],
        lambda qkv_TME: qkv_TME.transpose(0, 1),
        lambda qkv_TME: qkv_TME.transpose(1, 2),
        lambda qkv_TME: qkv_TME[:1, :1].expand(4, 3, -1),
        lambda qkv_TME: qkv_TME[:, :, :1].expand(-1, -1, 6),
    ],
    ids=["first", "middle", "steps", "head_first", "last_strided", "same_rows", "same_elements"],
)
def test_slices_of_inputs_and_gradients(view, fused, device):
    x_TME, grad_TME = (view(torch.randn(7, 8, 32, device=device)) for _ in range(2))
    angles = rotary_angles(x_TME.shape[0], x_TME.shape[2], like=x_TME)
    strided = run(fused, x_TME, angles=angles, grad_TME=grad_TME)
    compact = run(fused, x_TME.contiguous(), angles=angles, grad_TME=grad_TME.contiguous())
    for our, their in zip(strided, compact, strict=True):
        assert torch.equal(our, their)


def test_no_rows(fused, device):
    x_TME = torch.randn(0, 3, 16, device=device)
    angles = rotary_angles(0, 16, like=x_TME)
    for result in run(fused, x_TME, angles=angles, grad_TME=x_TME):
        assert result.shape == (0, 3, 16)


def test_without_gradients_the_same(fused, device):
    x_TME = torch.randn(5, 3, 16, device=device, requires_grad=True)
    angles = rotary_angles(5, 16, like=x_TME)
    with torch.no_grad():
        lean_TME = fused.rotate(x_TME, angles)
    assert lean_TME.grad_fn is None
    assert torch.equal(lean_TME, fused.rotate(x_TME, angles))
