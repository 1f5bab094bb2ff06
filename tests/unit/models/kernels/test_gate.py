# SPDX-License-Identifier: Apache-2.0
"""The fused gate against torch's in fp64: results, gradients, extreme values, layouts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tandem.models.operators import TORCH, Operators

# T, F: less than one block, a block and a little more, odd sizes.
SHAPES = [(1, 1), (7, 48), (5, 1500), (3, 1024), (2, 2051)]
ONE_ROUNDING = {"rtol": 2.0**-7, "atol": 1e-6}
CLOSE = {"rtol": 2e-6, "atol": 1e-6}


def run(operators, gate_up_T2F: Tensor, *, grad_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gated values, and the gradient of both halves."""
    gate_up_T2F = gate_up_T2F.detach().requires_grad_()
    y_TF = operators.gate(gate_up_T2F)
    return y_TF, *torch.autograd.grad(y_TF, gate_up_T2F, grad_TF)


def check_close_to_torch(
    operators, gate_up_T2F: Tensor, *, grad_TF: Tensor, tolerance: dict[str, float]
) -> None:
    ours = run(operators, gate_up_T2F, grad_TF=grad_TF)
    theirs = run(TORCH, gate_up_T2F.double(), grad_TF=grad_TF.double())
    for our, their in zip(ours, theirs, strict=True):
        assert our.dtype == gate_up_T2F.dtype
        torch.testing.assert_close(our.double(), their, **tolerance)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, CLOSE), (torch.bfloat16, ONE_ROUNDING)]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_torch(shape, dtype, tolerance, fused, device):
    num_tokens, inner = shape
    gate_up_T2F = 3 * torch.randn(num_tokens, 2 * inner).to(device, dtype)
    grad_TF = torch.randn(shape).to(device, dtype)
    check_close_to_torch(fused, gate_up_T2F, grad_TF=grad_TF, tolerance=tolerance)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_gates_saturate(fused, device):
    gate_TF = torch.tensor([[-1e4, -200.0, -89.0, -20.0, 0.0, 20.0, 200.0, 1e4]], device=device)
    gate_up_T2F = torch.cat((gate_TF, torch.full_like(gate_TF, 2.0)), 1)
    grad_TF = torch.ones_like(gate_TF)
    check_close_to_torch(fused, gate_up_T2F, grad_TF=grad_TF, tolerance=CLOSE)


def test_slices_of_inputs_and_gradients(fused, device):
    gate_up_T2F = torch.randn(12, 7, device=device).T[::2]
    grad_TF = torch.randn(4, 1, device=device).expand(4, 6)
    strided = run(fused, gate_up_T2F, grad_TF=grad_TF)
    compact = run(fused, gate_up_T2F.contiguous(), grad_TF=grad_TF.contiguous())
    for our, their in zip(strided, compact, strict=True):
        assert torch.equal(our, their)


def test_no_rows(fused, device):
    gate_up_T2F = torch.randn(0, 48, device=device)
    y_TF, grad_T2F = run(fused, gate_up_T2F, grad_TF=gate_up_T2F[:, :24])
    assert y_TF.shape == (0, 24)
    assert grad_T2F.shape == (0, 48)


def test_without_gradients_the_same(fused, device):
    gate_up_T2F = torch.randn(48, 5, device=device, requires_grad=True).T
    with torch.no_grad():
        lean_TF = fused.gate(gate_up_T2F)
    assert lean_TF.grad_fn is None
    assert torch.equal(lean_TF, fused.gate(gate_up_T2F))


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, CLOSE), (torch.bfloat16, ONE_ROUNDING)]
)
@pytest.mark.parametrize("shape", [*SHAPES, (0, 48)])
def test_of_experts_equals_torch(
    shape: tuple[int, int],
    dtype: torch.dtype,
    tolerance: dict[str, float],
    fused: Operators,
    device: torch.device,
) -> None:
    """The gradients of gate and up, the weighted values, and the gradients of the weights, which
    are sums of up to 2,051 products: their rounding errors grow with the sizes of the products."""
    num_rows, inner = shape
    gate_up_N2F = torch.randn(num_rows, 2 * inner).to(device, dtype)
    grad_NF, weight_N = torch.randn(shape).to(device, dtype), torch.rand(num_rows, device=device)
    ours = fused.expert_parts.differentiate(gate_up_N2F, grad_NF, weight_N=weight_N)
    theirs = TORCH.expert_parts.differentiate(
        gate_up_N2F.double(), grad_NF.double(), weight_N=weight_N.double()
    )
    for our, their in zip(ours[:2], theirs[:2], strict=True):
        assert our.dtype == dtype
        torch.testing.assert_close(our.double(), their, **tolerance)
    a_NF = TORCH.gate(gate_up_N2F.double())
    sizes_N = (grad_NF.double() * a_NF).abs().sum(1)
    assert ours[2].dtype == torch.float32
    assert ((ours[2].double() - theirs[2]).abs() <= 1e-5 * sizes_N + 1e-12).all()
