# SPDX-License-Identifier: Apache-2.0
"""Attention over long segments through cuDNN, one segment after another.

On Hopper it takes 0.5 to 0.6 of the time of flash attention (``benchmarks/DIARY.md``). torch's
operator fails for segments of several lengths, and its causal mask starts at the first key. Each
segment is therefore a call, with a query of zeros for each key of its prefix; nobody reads their
results. The rows are padded to a multiple, since each number of rows needs a plan (0.1 s).

Shapes: T tokens, Y keys, M padded rows, H query heads, K key/value heads, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.types import Segments

_MULTIPLE = 512
_MIN_MEAN_KEYS = 2048
"""Fewer keys a segment leave the device idle between calls."""
_SHARE_OF_TIME = 0.6
"""The time of a call by that of flash attention over the same keys."""
_MAX_HEAD_DIM = 128


@dataclass(frozen=True)
class Piece:
    """A segment: ``length`` tokens from ``start``, behind the ``prefix`` keys from ``before``."""

    start: int
    length: int
    before: int
    prefix: int

    @property
    def rows(self) -> int:
        """The number M of padded rows."""
        return -(-(self.prefix + self.length) // _MULTIPLE) * _MULTIPLE

    def queries(self, x_THE: Tensor) -> Tensor:
        """Return the rows of queries, or of what belongs to them, (M, H, E)."""
        own = x_THE[self.start : self.start + self.length]
        if self.length == self.rows:
            return own
        rows_MHE = x_THE.new_zeros((self.rows, *x_THE.shape[1:]))
        rows_MHE[self.prefix : self.prefix + self.length] = own
        return rows_MHE

    def keys(self, x_YKE: Tensor) -> Tensor:
        """Return the rows of keys or values, (M, K, E)."""
        rows_MKE = self.queries(x_YKE)
        if self.prefix:
            rows_MKE[: self.prefix] = x_YKE[self.before : self.before + self.prefix]
        return rows_MKE

    def own(self, rows: Tensor) -> Tensor:
        """Return what belongs to the tokens of the segment, (length, ...)."""
        return rows[self.prefix : self.prefix + self.length]

    def add_keys(self, rows_MKE: Tensor, total_YKE: Tensor) -> None:
        """Add the gradient of the keys to the gradient of all."""
        total_YKE[self.start : self.start + self.length] += self.own(rows_MKE)
        if self.prefix:
            total_YKE[self.before : self.before + self.prefix] += rows_MKE[: self.prefix]


def pieces_of(segments: Segments) -> tuple[Piece, ...]:
    """Return the segments if cuDNN computes them in less time than flash attention, else none."""
    own_S, prefix_S = segments.length_S.numpy(), segments.prefix_length_S.numpy()
    keys_S = own_S + prefix_S
    pairs = float(np.square(keys_S, dtype=np.float64).sum())
    unread = float(np.square(prefix_S, dtype=np.float64).sum())
    if keys_S.mean() < _MIN_MEAN_KEYS or _SHARE_OF_TIME * pairs > pairs - unread:
        return ()
    columns = (segments.start_S, segments.length_S)
    prefixes = (segments.prefix_start_S, segments.prefix_length_S)
    rows = zip(*(column.tolist() for column in (*columns, *prefixes)), strict=True)
    return tuple(Piece(*row) for row in rows)


def can_attend(q_THE: Tensor) -> bool:
    """Return whether cuDNN computes attention of these queries."""
    head_dim, is_half = q_THE.shape[-1], q_THE.dtype in (torch.bfloat16, torch.float16)
    return is_half and head_dim <= _MAX_HEAD_DIM and head_dim % 8 == 0


def attend(q_THE: Tensor, k_YKE: Tensor, *, v_YKE: Tensor, pieces: tuple[Piece, ...]) -> Tensor:
    """Return (T, H, E): attention within the segments and to their prefixes."""
    return _Dense.apply(q_THE, k_YKE, v_YKE, pieces)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THE: Tensor, k_YKE: Tensor, v_YKE: Tensor, pieces: tuple[Piece, ...]
    ) -> Tensor:
        o_THE = q_THE.new_empty(q_THE.shape)
        saved: list[Tensor] = []
        for piece in pieces:
            inputs = (piece.queries(q_THE), piece.keys(k_YKE), piece.keys(v_YKE))
            o_MHE, *others = forward(inputs)
            o_THE[piece.start : piece.start + piece.length] = piece.own(o_MHE)
            saved += others
        ctx.save_for_backward(q_THE, k_YKE, v_YKE, o_THE, *saved)
        ctx.pieces = pieces
        return o_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> Any:
        q_THE, k_YKE, v_YKE, o_THE, *saved = ctx.saved_tensors
        grad_q_THE = q_THE.new_empty(q_THE.shape)
        # A key gets the gradients of several segments: their sum is in fp32.
        sums = [x.new_zeros(x.shape, dtype=torch.float32) for x in (k_YKE, v_YKE)]
        others = iter(zip(*[iter(saved)] * _NUM_OTHERS, strict=True))
        for piece, other in zip(ctx.pieces, others, strict=True):
            inputs = (piece.queries(q_THE), piece.keys(k_YKE), piece.keys(v_YKE))
            # The results of zero queries are not kept, and their gradients are zero.
            grad_MHE, o_MHE = piece.queries(grad_THE.contiguous()), piece.queries(o_THE)
            grad_q_MHE, *grads = backward(grad_MHE, inputs, o_MHE=o_MHE, others=other)
            grad_q_THE[piece.start : piece.start + piece.length] = piece.own(grad_q_MHE)
            for total, grad in zip(sums, grads, strict=True):
                piece.add_keys(grad, total)
        return grad_q_THE, *(total.to(k_YKE.dtype) for total in sums), None


_NUM_OTHERS = 3
"""What ``forward`` returns beside the results: logarithms of sums, and two of dropout."""


def forward(inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return causal attention (M, H, E) of queries, keys and values, and what is saved besides."""
    rows, (q, k, v) = len(inputs[0]), (x.transpose(0, 1)[None] for x in inputs)
    outputs = torch.ops.aten._cudnn_attention_forward(
        q, k, v, None, None, None, rows, rows, True, 0.0, True, False
    )
    return outputs[0][0].transpose(0, 1), outputs[1], outputs[6], outputs[7]


def backward(
    grad_MHE: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor],
    *,
    o_MHE: Tensor,
    others: tuple[Tensor, ...],
) -> list[Tensor]:
    """Return the gradients of the inputs of ``forward``."""
    tensors = (grad_MHE, *inputs, o_MHE)
    gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(x.transpose(0, 1)[None] for x in tensors),
        *others,
        *(None, None, None),
        *(len(o_MHE), len(o_MHE)),
        0.0,
        True,
    )
    return [gradient[0].transpose(0, 1) for gradient in gradients]
