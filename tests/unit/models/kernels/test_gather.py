# SPDX-License-Identifier: Apache-2.0
"""Copies of rows, and a gradient that is the fp32 sum of the copies' in their order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

# Row 1 has no copy, row 3 four, in no order.
INDEX = np.array([3, 0, 3, 2, 3, 5, 5, 3, 4])
NUM_ROWS = 6


def run(x: Tensor, grad: Tensor, *, index: np.ndarray = INDEX) -> tuple[Tensor, Tensor]:
    """Return the copies, and the gradient of x."""
    gather_module = pytest.importorskip("tandem.models.kernels.gather", reason="needs triton")
    x = x.detach().requires_grad_()
    copies = gather_module.Gather(index, len(x), device=x.device)(x)
    return copies, *torch.autograd.grad(copies, x, grad)


@pytest.mark.parametrize("shape", [(1,), (7,), (2, 16), (3, 5)])
def test_equals_index_select(shape, fused, device):
    x, grad = torch.randn(NUM_ROWS, *shape), torch.randn(len(INDEX), *shape)
    copies, grad_x = run(x.to(device), grad.to(device))
    assert copies.is_contiguous()
    assert torch.equal(copies.cpu(), x[INDEX])
    expected = torch.zeros(x.shape, dtype=torch.float64).index_add_(
        0, torch.from_numpy(INDEX), grad.double()
    )
    torch.testing.assert_close(grad_x.cpu().double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(grad_x[1], torch.zeros_like(grad_x[1]))


def test_sums_are_fp32_in_the_order_of_the_copies(fused, device):
    x = torch.zeros(2, 1, dtype=torch.bfloat16, device=device)
    # In bf16 256 + 1 is 256: added up there, the ones would be lost.
    grad = torch.tensor([[256.0], *[[1.0]] * 8], dtype=torch.bfloat16, device=device)
    _, grad_x = run(x, grad, index=np.ones(9, dtype=np.int64))
    assert grad_x[1].item() == 264
    # In fp32 the order matters: a large number, its opposite, then what is left.
    x = torch.zeros(1, 1, device=device)
    for values, expected in (([1e8, -1e8, 1.0], 1.0), ([1e8, 1.0, -1e8], 0.0)):
        grad = torch.tensor(values, device=device)[:, None]
        assert run(x, grad, index=np.zeros(3, dtype=np.int64))[1].item() == expected


def test_gradients_in_any_layout(fused, device):
    x = torch.randn(NUM_ROWS, 4, device=device)
    grad = torch.randn(4, len(INDEX), device=device).T
    assert torch.equal(run(x, grad)[1], run(x, grad.contiguous())[1])
