# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""A gather of rows whose backward pass sums the copies of a row in a fixed order, in fp32.

The backward pass of torch's index_select uses atomics: it adds in an undefined order, and in the
tensor's precision.

Shapes: T rows, Y copies, W elements of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.models.operators import upload


class Gather:
    """The function ``gather(x_T...) -> x_Y...`` for a fixed index."""

    def __init__(self, index_Y: np.ndarray, num_rows: int, *, device: torch.device) -> None:
        """Prepare ``index_Y``, int64: the row of each copy, in 0..``num_rows`` - 1."""
        counts_T = np.bincount(index_Y, minlength=num_rows)
        starts = np.concatenate(([0], np.cumsum(counts_T)))
        self.index_Y = upload(torch.from_numpy(index_Y), device)
        self.copies_Y = upload(torch.from_numpy(np.argsort(index_Y, kind="stable")), device)
        self.starts = upload(torch.from_numpy(starts), device)

    def __call__(self, x: Tensor) -> Tensor:
        """Return the copies, contiguous."""
        return _Gather.apply(x, self)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gather: Gather) -> Tensor:
        ctx.gather = gather
        return x.index_select(0, gather.index_Y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        gather: Gather = ctx.gather
        num_rows, width = len(gather.starts) - 1, grad[0].numel()
        out = grad.new_empty((num_rows, *grad.shape[1:]))
        if num_rows:
            block = triton.next_power_of_2(width)
            _sum_copies[(num_rows,)](
                grad.contiguous(), gather.copies_Y, gather.starts, out, width, BLOCK=block
            )
        return out, None


@triton.jit
def _sum_copies(grad_ptr, copies_ptr, starts_ptr, out_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK)
    inside = w < width
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)):
        copy = tl.load(copies_ptr + i)
        total += tl.load(grad_ptr + copy * width + w, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + w, total.to(out_ptr.dtype.element_ty), mask=inside)
