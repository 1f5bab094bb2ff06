# SPDX-License-Identifier: Apache-2.0
"""Fused additions to a sum against torch's."""

from __future__ import annotations

import pytest
import torch

from tandem.models.operators import TORCH, Operators


@pytest.mark.parametrize("shape", [(0,), (1,), (2048,), (3, 4099)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_equals_torch_bit_for_bit(
    shape: tuple[int, ...], dtype: torch.dtype, fused: Operators, device: torch.device
) -> None:
    """Each number is one sum in fp32 of two numbers, which has one rounding."""
    total, x = torch.randn(shape, device=device), torch.randn(shape).to(device, dtype)
    theirs = total.clone()
    TORCH.add_into(theirs, x)
    fused.add_into(total, x)
    assert torch.equal(total, theirs)


def test_tensors_that_are_not_contiguous(fused: Operators, device: torch.device) -> None:
    total = torch.randn(6, 4, device=device).T
    x = torch.randn(4, 6).to(device, torch.bfloat16)
    wanted = total + x.float()
    fused.add_into(total, x)
    assert torch.equal(total, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_products(
    num_tokens: int, dtype: torch.dtype, fused: Operators, device: torch.device
) -> None:
    """The bound is one rounding of each product to its precision, which CPUs make."""
    y_TN, x_TI = (torch.randn(num_tokens, size).to(device, dtype) for size in (24, 40))
    total_NI = torch.randn(24, 40, device=device)
    added_NI = y_TN.double().T @ x_TI.double()
    wanted_NI = total_NI.double() + added_NI
    fused.add_product(total_NI, y_TN, x_TI=x_TI)
    rounding = torch.finfo(dtype).eps * added_NI.abs().max().item() if num_tokens else 0.0
    torch.testing.assert_close(total_NI.double(), wanted_NI, rtol=1e-5, atol=1e-5 + rounding)
