# SPDX-License-Identifier: Apache-2.0
"""Attention over a packed batch: differentiable, built once a micro-batch, used by every layer.

This is the generic back end, right on every device and fast on a CPU: rows of similar length are
padded to a rectangle inside the attention only, and torch's scaled_dot_product_attention does the
work. A kernel for packed sequences replaces ``PackedAttention`` with the same two methods.

Shapes: T tokens, B rows of a bucket, L padded queries, M padded keys, H query heads, K key/value
heads, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.types import Segments

SHORTEST_IN_BUCKET = 0.6
"""Rows share a bucket down to this fraction of its longest row. Fewer buckets cost padding, more
cost calls (measured: 2 to 4 buckets are equally fast on rows of 30 to 80 keys)."""


class PackedAttention:
    """``attention(layer, q_THE, k_TKE, v_TKE) -> o_THE`` for the segments of one packed batch.

    Token i of a segment attends to the whole prefix of that segment and to its tokens 0..i.
    """

    def __init__(self, segments: Segments, device: torch.device | str = "cpu") -> None:
        self._buckets = [_make_bucket(segments, rows) for rows in _group_rows(segments)]
        self._buckets = [bucket.to(device) for bucket in self._buckets]
        self._output_T = _output_index(self._buckets, segments).to(device)

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Attend within segments and to their prefixes; the same for every ``layer``."""
        outputs = [_attend(bucket, q_THE, k_TKE=k_TKE, v_TKE=v_TKE) for bucket in self._buckets]
        return torch.cat(outputs).index_select(0, self._output_T).view_as(q_THE)


@dataclass(frozen=True)
class _Bucket:
    """B rows padded to (L, M). Padding repeats the row's last token; nobody reads its result.

    ``mask_B1LM`` is additive. None when no row has a prefix: plain causal attention, with M = L.
    """

    query_BL: Tensor
    key_BM: Tensor
    valid_BL: Tensor
    mask_B1LM: Tensor | None

    def to(self, device: torch.device | str) -> _Bucket:
        mask = None if self.mask_B1LM is None else self.mask_B1LM.to(device)
        return _Bucket(self.query_BL.to(device), self.key_BM.to(device), self.valid_BL, mask)


def _group_rows(segments: Segments) -> list[Tensor]:
    """Segment numbers by bucket: with and without prefix apart, then by number of keys."""
    groups = []
    num_keys_S = segments.prefix_length_S + segments.length_S
    for with_prefix in (False, True):
        rows = ((segments.prefix_length_S > 0) == with_prefix).nonzero()[:, 0]
        rows = rows[num_keys_S[rows].argsort(descending=True, stable=True)]
        while len(rows):
            lengths = num_keys_S[rows]
            size = int((lengths >= SHORTEST_IN_BUCKET * lengths[0]).sum())
            groups.append(rows[:size])
            rows = rows[size:]
    return groups


def _make_bucket(segments: Segments, rows: Tensor) -> _Bucket:
    start, length, prefix_start, prefix = (
        x[rows][:, None]
        for x in (
            segments.start_S,
            segments.length_S,
            segments.prefix_start_S,
            segments.prefix_length_S,
        )
    )
    query = torch.arange(int(length.max()))
    key = torch.arange(int((prefix + length).max()))
    own_BM = key - prefix
    last = start + length - 1
    key_BM = torch.where(own_BM < 0, prefix_start + key, (start + own_BM).minimum(last))
    mask_B1LM = None
    if bool(prefix.any()):
        hidden_BLM = own_BM[:, None, :] > query[:, None]
        mask_B1LM = torch.zeros(hidden_BLM.shape).masked_fill_(hidden_BLM, -torch.inf)[:, None]
    return _Bucket((start + query).minimum(last), key_BM, query < length, mask_B1LM)


def _output_index(buckets: list[_Bucket], segments: Segments) -> Tensor:
    """Where token t lies in the concatenated padded outputs."""
    valid = torch.cat([bucket.valid_BL.flatten() for bucket in buckets]).nonzero()[:, 0]
    token = torch.cat([bucket.query_BL.flatten() for bucket in buckets]).cpu()[valid]
    return torch.empty(int(segments.length_S.sum()), dtype=torch.int64).scatter_(0, token, valid)


def _attend(bucket: _Bucket, q_THE: Tensor, *, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
    """(B * L, H * E)."""
    q_BHLE = _gather_rows(q_THE, bucket.query_BL)
    k_BKME = _gather_rows(k_TKE, bucket.key_BM)
    v_BKME = _gather_rows(v_TKE, bucket.key_BM)
    mask = None if bucket.mask_B1LM is None else bucket.mask_B1LM.to(q_THE.dtype)
    o_BHLE = F.scaled_dot_product_attention(
        q_BHLE, k_BKME, v_BKME, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return o_BHLE.transpose(1, 2).reshape(bucket.query_BL.numel(), -1)


def _gather_rows(x_TNE: Tensor, index_BL: Tensor) -> Tensor:
    """(B, N, L, E). index_select and its backward are fast on the rows of a matrix."""
    rows = x_TNE.flatten(1).index_select(0, index_BL.flatten())
    return rows.view(*index_BL.shape, *x_TNE.shape[1:]).transpose(1, 2)
