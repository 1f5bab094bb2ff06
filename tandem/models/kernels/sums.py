# SPDX-License-Identifier: Apache-2.0
"""Tensors and products are added to sums of a higher precision in place.

Where the precisions of a sum and of a tensor differ, torch's operator takes half as long again as
the Triton kernel on an H200 (``benchmarks/DIARY.md``).

Shapes: T tokens, I inputs, N outputs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


def add_into(total: Tensor, x: Tensor) -> None:
    """See ``operators.Operators.add_into``."""
    plain = total.is_contiguous() and x.is_contiguous() and total.dtype != torch.float64
    if not plain or x.dtype == total.dtype:
        total.add_(x)
        return
    _add.run(
        total,
        x,
        total.numel(),
        BLOCK=_BLOCK,
        grid=(-(-total.numel() // _BLOCK),),
        warmup=False,
        num_warps=4,
    )


def add_product(total_NI: Tensor, y_TN: Tensor, *, x_TI: Tensor) -> None:
    """See ``operators.Operators.add_product``.

    On a device, a product of half-precision tensors is added to an fp32 sum without being rounded
    before.
    """
    if total_NI.dtype == torch.float32 != x_TI.dtype and x_TI.device.type != "cpu":
        torch.addmm(total_NI, y_TN.T, x_TI, out_dtype=torch.float32, out=total_NI)
    else:
        add_into(total_NI, y_TN.T @ x_TI)


@triton.jit
def _add(total_ptr, x_ptr, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    total = tl.load(total_ptr + at, inside)
    x = tl.load(x_ptr + at, inside).to(tl.float32)
    tl.store(total_ptr + at, (total.to(tl.float32) + x).to(total.dtype), inside)
