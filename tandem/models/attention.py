# SPDX-License-Identifier: Apache-2.0
"""Attention over a packed batch, built once per micro-batch and used by every layer.

This generic implementation runs on every device and is fast on a CPU. It pads rows of similar
length to a rectangle and calls torch's scaled_dot_product_attention.

Shapes: T tokens, B rows of a bucket, L padded queries, M padded keys, H query heads, K key/value
heads, E head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from tandem.types import Segments

SHORTEST_IN_BUCKET = 0.6
"""The minimum ratio of shortest to longest row in a bucket. Fewer buckets cost padding, more
buckets cost calls (measured: 2 to 4 are equally fast on rows of 30 to 80 keys)."""


class PackedAttention:
    """The function ``attention(layer, q_THE, k_TKE, v_TKE) -> o_THE`` of one packed batch.

    Token i of a segment attends to the whole prefix of that segment and to its tokens 0..i.
    """

    def __init__(self, segments: Segments, device: torch.device | str = "cpu") -> None:
        rows_S4 = _as_rows(segments)
        buckets = [_make_bucket(rows_S4[chosen]) for chosen in _group_rows(rows_S4)]
        self._output_T = torch.from_numpy(_output_index(buckets)).to(device)
        self._buckets = [bucket.to(device) for bucket in buckets]

    def __call__(self, layer: int, q_THE: Tensor, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
        """Attend within segments and to their prefixes; the same for every ``layer``."""
        outputs = [_attend(bucket, q_THE, k_TKE=k_TKE, v_TKE=v_TKE) for bucket in self._buckets]
        return torch.cat(outputs).index_select(0, self._output_T).view_as(q_THE)


class RunAttention:
    """The function ``attend(q_NHE, k_NHE, v_NHE=) -> o_NHE`` within runs of N patches.

    Every patch attends to all patches of its run. Runs of one length are one call.
    """

    def __init__(self, lengths: np.ndarray, device: torch.device) -> None:
        """Prepare the runs of ``lengths``, which follow one another."""
        starts = np.cumsum(lengths) - lengths
        runs = [starts[lengths == n][:, None] + np.arange(n) for n in np.unique(lengths)]
        back_N = np.argsort(np.concatenate([run.ravel() for run in runs]))
        self._runs = [torch.from_numpy(run).to(device) for run in runs]
        self._back_N = torch.from_numpy(back_N).to(device)

    def __call__(self, q_NHE: Tensor, k_NHE: Tensor, *, v_NHE: Tensor) -> Tensor:
        """Attend within the runs."""
        outputs: list[Tensor] = []
        for run in self._runs:
            q, k, v = (x[run].transpose(1, 2) for x in (q_NHE, k_NHE, v_NHE))
            o = F.scaled_dot_product_attention(q, k, v)
            outputs.append(o.transpose(1, 2).flatten(0, 1))
        return torch.cat(outputs)[self._back_N]


@dataclass(frozen=True)
class _Bucket:
    """B rows padded to (L, M). Padding repeats the last token of a row; its results are ignored.

    ``mask_B1LM`` is additive; None means plain causal attention with M = L, if no row has a prefix.
    """

    query_BL: Tensor
    key_BM: Tensor
    mask_B1LM: Tensor | None


@dataclass(frozen=True)
class _Layout:
    """A bucket as numpy arrays, three times as fast as torch in many small operations."""

    query_BL: np.ndarray
    valid_BL: np.ndarray
    key_BM: np.ndarray
    hidden_BLM: np.ndarray | None

    def to(self, device: torch.device | str) -> _Bucket:
        mask_B1LM = None
        if self.hidden_BLM is not None:
            mask_BLM = np.where(self.hidden_BLM, np.float32(-np.inf), np.float32(0))
            mask_B1LM = torch.from_numpy(mask_BLM[:, None]).to(device)
        query_BL, key_BM = torch.from_numpy(self.query_BL), torch.from_numpy(self.key_BM)
        return _Bucket(query_BL.to(device), key_BM.to(device), mask_B1LM)


def _as_rows(segments: Segments) -> np.ndarray:
    """Return int64 (S, 4): start and length of each segment, start and length of its prefix."""
    columns = (
        segments.start_S,
        segments.length_S,
        segments.prefix_start_S,
        segments.prefix_length_S,
    )
    return np.stack([column.numpy() for column in columns], axis=1)


def _group_rows(rows_S4: np.ndarray) -> list[np.ndarray]:
    """Return the segments of each bucket: with and without prefixes apart, by number of keys."""
    groups: list[np.ndarray] = []
    num_keys_S = rows_S4[:, 1] + rows_S4[:, 3]
    for with_prefix in (False, True):
        rows = np.flatnonzero((rows_S4[:, 3] > 0) == with_prefix)
        rows = rows[np.argsort(-num_keys_S[rows], kind="stable")]
        while len(rows):
            lengths = num_keys_S[rows]
            size = int((lengths >= SHORTEST_IN_BUCKET * lengths[0]).sum())
            groups.append(rows[:size])
            rows = rows[size:]
    return groups


def _make_bucket(rows_B4: np.ndarray) -> _Layout:
    start, length, prefix_start, prefix = np.hsplit(rows_B4, 4)
    query = np.arange(length.max())
    key = np.arange((prefix + length).max())
    own_BM = key - prefix
    last = start + length - 1
    return _Layout(
        query_BL=np.minimum(start + query, last),
        valid_BL=query < length,
        key_BM=np.where(own_BM < 0, prefix_start + key, np.minimum(start + own_BM, last)),
        hidden_BLM=own_BM[:, None, :] > query[:, None] if prefix.any() else None,
    )


def _output_index(buckets: list[_Layout]) -> np.ndarray:
    """Return the place of each token in the concatenated padded outputs."""
    place = np.flatnonzero(np.concatenate([bucket.valid_BL.ravel() for bucket in buckets]))
    token = np.concatenate([bucket.query_BL.ravel() for bucket in buckets])[place]
    output_T = np.empty_like(place)
    output_T[token] = place
    return output_T


def _attend(bucket: _Bucket, q_THE: Tensor, *, k_TKE: Tensor, v_TKE: Tensor) -> Tensor:
    """Return the padded outputs of a bucket, (B * L, H * E)."""
    q_BHLE = _gather_rows(q_THE, bucket.query_BL)
    k_BKME = _gather_rows(k_TKE, bucket.key_BM)
    v_BKME = _gather_rows(v_TKE, bucket.key_BM)
    mask = None if bucket.mask_B1LM is None else bucket.mask_B1LM.to(q_THE.dtype)
    o_BHLE = F.scaled_dot_product_attention(
        q_BHLE, k_BKME, v_BKME, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
    return o_BHLE.transpose(1, 2).reshape(bucket.query_BL.numel(), -1)


def _gather_rows(x_TNE: Tensor, index_BL: Tensor) -> Tensor:
    """Return (B, N, L, E)."""
    # index_select and its backward are fast on the rows of a matrix.
    rows = x_TNE.flatten(1).index_select(0, index_BL.flatten())
    return rows.view(*index_BL.shape, *x_TNE.shape[1:]).transpose(1, 2)
