# SPDX-License-Identifier: Apache-2.0
"""Attention over a packed batch through torch's variable-length flash attention (Dao, 2023).

Batches of long segments are computed by cuDNN instead (``dense.py``). There is no padding. Keys and
values of a shared prefix are repeated before each of its segments, inside attention only. The
backward pass sums their gradients in a fixed order. The kernel supports half precision only; other
precisions use the generic implementation.

Shapes: T tokens, S segments, Y keys with prefixes repeated, H query heads, K key/value heads, E
head dimension.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tandem.models.attention import PackedAttention, RunAttention
from tandem.models.kernels import dense
from tandem.models.kernels.gather import Gather
from tandem.models.operators import upload
from tandem.types import Segments

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_DIM = 256


class VarlenAttention:
    """The function ``attention(layer, q_THE, k_TKE, v_TKE) -> o_THE`` of one packed batch."""

    def __init__(
        self, segments: Segments, device: torch.device, *, has_dense_attention: bool = False
    ) -> None:
        self._segments = segments
        self._device = device
        self._generic: PackedAttention | None = None
        self._pieces = dense.pieces_of(segments) if has_dense_attention else ()
        keys_S = segments.prefix_length_S + segments.length_S
        self._starts = (_starts(segments.length_S, device), _starts(keys_S, device))
        self._longest = (int(segments.length_S.max()), int(keys_S.max()))

    @cached_property
    def _gather(self) -> Gather | None:
        """The gather that repeats shared prefixes; None without any. cuDNN's calls need none."""
        segments = self._segments
        if not bool((segments.prefix_length_S > 0).any()):
            return None
        return Gather(_key_index(segments), int(segments.length_S.sum()), device=self._device)

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Attend within segments and to their prefixes; the same for every ``layer``."""
        if q_THE.dtype not in _DTYPES or q_THE.shape[-1] > _MAX_HEAD_DIM:
            self._generic = self._generic or PackedAttention(self._segments, self._device)
            return self._generic(layer, q_THE, k_TKE, v_TKE)
        if self._pieces and dense.can_attend(q_THE):
            return dense.attend(q_THE, k_TKE, v_YKE=v_TKE, pieces=self._pieces)
        if self._gather is not None:
            k_TKE, v_TKE = self._gather(k_TKE), self._gather(v_TKE)
        return _Flash.apply(q_THE, k_TKE, v_TKE, self._starts, self._longest, True)


class VarlenRunAttention:
    """The function ``attend(q_NHE, k_NHE, v_NHE=) -> o_NHE`` within runs of patches."""

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        """Prepare the runs of ``lengths``, which follow one another."""
        self._lengths, self._device = lengths, device
        self._starts = _starts(torch.from_numpy(lengths), device)
        self._generic: RunAttention | None = None

    def __call__(self, q_NHE: Tensor, k_NHE: Tensor, *, v_NHE: Tensor) -> Tensor:
        """Attend within the runs."""
        if q_NHE.dtype not in _DTYPES or q_NHE.shape[-1] > _MAX_HEAD_DIM:
            self._generic = self._generic or RunAttention(self._lengths, self._device)
            return self._generic(q_NHE, k_NHE, v_NHE=v_NHE)
        starts, longest = (self._starts, self._starts), (int(self._lengths.max()),) * 2
        return _Flash.apply(q_NHE, k_NHE, v_NHE, starts, longest, False)


class _Flash(torch.autograd.Function):
    """Attention within segments.

    If it is causal, it is aligned at the end: query i of a segment sees its prefix and keys 0..i.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_THE: Tensor,
        k_YKE: Tensor,
        v_YKE: Tensor,
        starts: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        is_causal: bool,
    ) -> Tensor:
        outputs = torch.ops.aten._flash_attention_forward(
            q_THE, k_YKE, v_YKE, *starts, *longest, 0.0, is_causal, False
        )
        o_THE, log_sum, seed, offset = outputs[:4]
        ctx.save_for_backward(q_THE, k_YKE, v_YKE, o_THE, log_sum, seed, offset, *starts)
        ctx.longest, ctx.is_causal = longest, is_causal
        return o_THE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_THE: Tensor) -> Any:
        q_THE, k_YKE, v_YKE, o_THE, log_sum, seed, offset, *starts = ctx.saved_tensors
        gradients = torch.ops.aten._flash_attention_backward(
            grad_THE.contiguous(),
            q_THE,
            k_YKE,
            v_YKE,
            o_THE,
            log_sum,
            *starts,
            *ctx.longest,
            0.0,
            ctx.is_causal,
            seed,
            offset,
        )
        return *gradients, None, None, None


def _starts(lengths_S: Tensor, device: torch.device) -> Tensor:
    """Return the cumulative lengths with a leading 0, int32 (S + 1,)."""
    starts = torch.zeros(len(lengths_S) + 1, dtype=torch.int32)
    starts[1:] = lengths_S.cumsum(0)
    return upload(starts, device)


def _key_index(segments: Segments) -> np.ndarray:
    """Return the token of each key, (Y,): for each segment its prefix, then its own tokens."""
    starts = torch.stack((segments.prefix_start_S, segments.start_S), 1).flatten().numpy()
    lengths = torch.stack((segments.prefix_length_S, segments.length_S), 1).flatten().numpy()
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(lengths.sum())
