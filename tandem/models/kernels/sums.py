# SPDX-License-Identifier: Apache-2.0
"""Triton kernel: a tensor of another precision is added to a sum in place.

Where the precisions differ, torch's operator takes half as long again on an H200
(``benchmarks/DIARY.md``).

Shapes: N numbers.
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


@triton.jit
def _add(total_ptr, x_ptr, num_elements, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_elements
    total = tl.load(total_ptr + at, inside)
    x = tl.load(x_ptr + at, inside).to(tl.float32)
    tl.store(total_ptr + at, (total.to(tl.float32) + x).to(total.dtype), inside)
