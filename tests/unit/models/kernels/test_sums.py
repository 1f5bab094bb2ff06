# SPDX-License-Identifier: Apache-2.0
"""The fused addition to a sum against torch's."""

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
