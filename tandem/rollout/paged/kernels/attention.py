# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernel: one new token a row attends to its pages, and its key and value enter the cache.

Each program takes one row, one key/value head with the query heads that share it, and one share of
the row's pages. A row has as many shares as it has pages for; if that is more than one, a second
kernel merges their results. Rows that are not active store nothing and read no page. Softmax and
sums are fp32.

Shapes: B rows, H query heads, K key/value heads, G = H / K, E head dimension, P tokens of a page, N
pages of a block table, S shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.rollout.paged.cache import LayerCache, RowTables

_MIN_DOT_ROWS = 16


def decode_attention(
    q_BHE: Tensor, k_BKE: Tensor, *, v_BKE: Tensor, cache: LayerCache, rows: RowTables
) -> Tensor:
    """Store k and v at each row's position, attend to everything up to there: o (B, H, E)."""
    num_rows, num_heads, head_dim = q_BHE.shape
    kv_heads = k_BKE.shape[1]
    group = num_heads // kv_heads
    shares = rows.num_shares
    o_BHE = torch.empty((num_rows, num_heads, head_dim), dtype=q_BHE.dtype, device=q_BHE.device)
    _attend[(num_rows, kv_heads, shares)](
        q_BHE,
        k_BKE,
        v_BKE,
        cache.keys,
        cache.values,
        rows.table_BN,
        rows.position_B,
        rows.active_B,
        o_BHE,
        rows.partial_BHSE,
        rows.stats_BHS2,
        q_BHE.stride(0),
        k_BKE.stride(0),
        v_BKE.stride(0),
        rows.table_BN.stride(0),
        rows.position_B.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=group,
        GROUP_ROWS=max(_MIN_DOT_ROWS, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        PAGE=cache.keys.shape[2],
        SHARES=shares,
        SHARE_PAGES=rows.share_pages,
        PRECISION="ieee" if q_BHE.dtype == torch.float32 else "tf32",
        num_warps=4,
        num_stages=3 if head_dim <= 128 else 2,
    )
    if shares > 1:
        _merge[(num_rows, num_heads)](
            rows.position_B,
            rows.active_B,
            rows.partial_BHSE,
            rows.stats_BHS2,
            o_BHE,
            rows.position_B.stride(0),
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            PAGE=cache.keys.shape[2],
            SHARES=shares,
            SHARE_PAGES=rows.share_pages,
            SHARE_ROWS=triton.next_power_of_2(shares),
            num_warps=1,
        )
    return o_BHE


@triton.jit
def _shares_of(position, PAGE: tl.constexpr, SHARES: tl.constexpr, SHARE_PAGES: tl.constexpr):
    """How many shares the pages before a position are divided into, at least one."""
    return tl.maximum(tl.minimum(tl.cdiv(tl.cdiv(position, PAGE), SHARE_PAGES), SHARES), 1)


@triton.jit
def _attend(
    q_ptr,
    k_ptr,
    v_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    position_ptr,
    active_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    q_stride,
    k_stride,
    v_stride,
    table_stride,
    state_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE_PAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    share = tl.program_id(2)
    g = tl.arange(0, GROUP_ROWS)
    e = tl.arange(0, HEAD_DIM)
    t = tl.arange(0, PAGE)
    active = tl.load(active_ptr + row * state_stride) != 0
    position = tl.where(active, tl.load(position_ptr + row * state_stride), 0)
    num_shares = _shares_of(position, PAGE, SHARES, SHARE_PAGES)
    if share >= num_shares:
        return
    valid_g = g < GROUP
    q_offset = row * q_stride + (head * GROUP + g)[:, None] * HEAD_DIM + e[None, :]
    q = tl.load(q_ptr + q_offset, mask=valid_g[:, None], other=0.0)

    num_pages = tl.cdiv(position, PAGE)
    first = share * num_pages // num_shares
    last = (share + 1) * num_pages // num_shares
    # The new token stands in registers: share 0 starts from it, the others from nothing.
    k_new = tl.load(k_ptr + row * k_stride + head * HEAD_DIM + e)
    v_new = tl.load(v_ptr + row * v_stride + head * HEAD_DIM + e)
    own = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    is_first = share == 0
    top = tl.where(is_first, own, -1e30)
    total = tl.where(is_first, tl.full([GROUP_ROWS], 1.0, tl.float32), 0.0)
    weighted = total[:, None] * v_new.to(tl.float32)[None, :]
    if active & is_first:
        page = tl.load(table_ptr + row * table_stride + position // PAGE).to(tl.int64)
        slot = ((page * KV_HEADS + head) * PAGE + position % PAGE) * HEAD_DIM + e
        tl.store(keys_ptr + slot, k_new)
        tl.store(values_ptr + slot, v_new)

    for index in range(first, last):
        page = tl.load(table_ptr + row * table_stride + index).to(tl.int64)
        base = (page * KV_HEADS + head) * PAGE * HEAD_DIM
        inside = (index * PAGE + t) < position
        offset = base + t[:, None] * HEAD_DIM + e[None, :]
        k = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0)
        v = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        scores = tl.where(inside[None, :], scores, -1e30)
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - new_top[:, None])
        decay = tl.exp(top - new_top)
        update = tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        weighted = weighted * decay[:, None] + update
        total = total * decay + tl.sum(weights, 1)
        top = new_top

    head_row = (row * KV_HEADS + head) * GROUP + g
    if num_shares == 1:
        out = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
        out_offset = head_row[:, None] * HEAD_DIM + e[None, :]
        tl.store(out_ptr + out_offset, out, mask=valid_g[:, None])
    else:
        cell = head_row * SHARES + share
        partial_offset = cell[:, None] * HEAD_DIM + e[None, :]
        tl.store(partial_ptr + partial_offset, weighted, mask=valid_g[:, None])
        tl.store(stats_ptr + cell * 2, top, mask=valid_g)
        tl.store(stats_ptr + cell * 2 + 1, total, mask=valid_g)


@triton.jit
def _merge(
    position_ptr,
    active_ptr,
    partial_ptr,
    stats_ptr,
    out_ptr,
    state_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    SHARES: tl.constexpr,
    SHARE_PAGES: tl.constexpr,
    SHARE_ROWS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    active = tl.load(active_ptr + row * state_stride) != 0
    position = tl.where(active, tl.load(position_ptr + row * state_stride), 0)
    num_shares = _shares_of(position, PAGE, SHARES, SHARE_PAGES)
    if num_shares == 1:
        return
    head_row = row * HEADS + tl.program_id(1)
    s = tl.arange(0, SHARE_ROWS)
    e = tl.arange(0, HEAD_DIM)
    valid = s < num_shares
    cell = head_row * SHARES + s
    top = tl.load(stats_ptr + cell * 2, mask=valid, other=-1e30)
    total = tl.load(stats_ptr + cell * 2 + 1, mask=valid, other=0.0)
    factor = tl.exp(top - tl.max(top, 0))
    offset = cell[:, None] * HEAD_DIM + e[None, :]
    weighted = tl.load(partial_ptr + offset, mask=valid[:, None], other=0.0)
    out = tl.sum(weighted * factor[:, None], 0) / tl.sum(total * factor, 0)
    tl.store(out_ptr + head_row * HEAD_DIM + e, out.to(out_ptr.dtype.element_ty))
