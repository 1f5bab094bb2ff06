# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernels: pages that several rows have in common are read once for a tile of rows.

The samples of a prompt have its full pages in common. A tile is adjacent rows of one prompt, as
many as have 64 query heads of a key/value head. Its pages are split among programs; each row adds
the parts that were found for it to what it finds in its own pages (Hydragen, arXiv:2402.05099).

Shapes: B rows, H query heads, K key/value heads, G = H / K, E head dimension, M heads of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.rollout.paged.cache import LayerCache, RowTables, Tiles
from tandem.rollout.paged.kernels.parts import add_page, store_part

_TILE_HEADS = 64
MOST_GROUP = _TILE_HEADS // 2
"""The most query heads of a key/value head with which a tile has several rows."""


def make_tiles(rows: RowTables, tiles: Tiles, *, group: int, num_programs: int) -> None:
    """Fill ``tiles`` for the rows.

    Args:
        group: query heads of a key/value head, at most ``MOST_GROUP``.
        num_programs: programs of a key/value head among which pages are split.
    """
    num_rows = len(rows.position_B)
    _make_tiles[(1,)](
        rows.shared_B,
        rows.table_BN,
        tiles.num_pages_B,
        tiles.row_B,
        tiles.counts_2,
        num_rows,
        num_programs,
        rows.shared_B.stride(0),
        rows.table_BN.stride(0),
        ROWS=triton.next_power_of_2(num_rows),
        TILE_ROWS=_TILE_HEADS // group,
        MOST_SPLITS=tiles.most_splits(num_rows),
        num_warps=8,
    )


def attend_tiles(
    q_BHE: Tensor, cache: LayerCache, *, rows: RowTables, tiles: Tiles, num_programs: int
) -> None:
    """Attend to the pages of all tiles, and store a part for each split and row."""
    num_rows, num_heads, head_dim = q_BHE.shape
    kv_heads, page_tokens = cache.keys.shape[1:3]
    _attend_tiles[(num_programs, kv_heads)](
        q_BHE,
        cache.keys,
        cache.values,
        rows.table_BN,
        rows.shared_B,
        tiles.row_B,
        tiles.counts_2,
        tiles.part_QHE,
        tiles.stats_QH2,
        num_rows,
        q_BHE.stride(0),
        rows.table_BN.stride(0),
        rows.shared_B.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        TILE_HEADS=_TILE_HEADS,
        HEAD_DIM=head_dim,
        PAGE=page_tokens,
        PRECISION="ieee" if q_BHE.dtype == torch.float32 else "tf32",
        num_warps=4 if head_dim <= 128 else 8,
        num_stages=2,
    )


@triton.jit
def _last_shared(shared_ptr, table_ptr, row, num_rows, state_stride, table_stride):
    """Return the last page that each row may share, or -1. A page belongs to one place of one
    prompt, so that rows with the same last page have all pages before it in common, too.
    """
    valid = (row >= 0) & (row < num_rows)
    shared = tl.load(shared_ptr + row * state_stride, mask=valid, other=0)
    last_ptr = table_ptr + row.to(tl.int64) * table_stride + shared - 1
    return tl.load(last_ptr, mask=valid & (shared > 0), other=-1)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _make_tiles(
    shared_ptr,
    table_ptr,
    num_pages_ptr,
    row_ptr,
    counts_ptr,
    num_rows,
    num_programs,
    state_stride,
    table_stride,
    ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    last = _last_shared(shared_ptr, table_ptr, row, num_rows, state_stride, table_stride)
    before = _last_shared(shared_ptr, table_ptr, row - 1, num_rows, state_stride, table_stride)
    behind = _last_shared(shared_ptr, table_ptr, row + 1, num_rows, state_stride, table_stride)
    follows = (last >= 0) & (last == before)
    has_tile = follows | ((last >= 0) & (last == behind))
    num_pages = tl.load(shared_ptr + row * state_stride, mask=has_tile, other=0)
    tl.store(num_pages_ptr + row, num_pages.to(tl.int32), mask=row < num_rows)
    first = tl.associative_scan(tl.where(follows, -1, row), 0, _larger)
    begins = has_tile & ((row - first) % TILE_ROWS == 0)
    index = tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(row_ptr + index, row, mask=begins)
    num_tiles = tl.sum(begins.to(tl.int32), 0)
    splits = tl.minimum(tl.maximum(num_programs // tl.maximum(num_tiles, 1), 1), MOST_SPLITS)
    tl.store(counts_ptr, num_tiles)
    tl.store(counts_ptr + 1, splits)


@triton.jit
def _attend_tiles(
    q_ptr,
    keys_ptr,
    values_ptr,
    table_ptr,
    shared_ptr,
    row_ptr,
    counts_ptr,
    part_ptr,
    stats_ptr,
    num_rows,
    q_stride,
    table_stride,
    state_stride,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(1)
    splits = tl.load(counts_ptr + 1)
    m = tl.arange(0, TILE_HEADS)
    e = tl.arange(0, HEAD_DIM)
    t = tl.arange(0, PAGE)
    head_m = head * GROUP + m % GROUP
    for item in range(tl.program_id(0), tl.load(counts_ptr) * splits, tl.num_programs(0)):
        split = item % splits
        first = tl.load(row_ptr + item // splits)
        num_pages = tl.load(shared_ptr + first * state_stride).to(tl.int32)
        pages_ptr = table_ptr + first.to(tl.int64) * table_stride
        row = first + m // GROUP
        last = _last_shared(shared_ptr, table_ptr, row, num_rows, state_stride, table_stride)
        valid = (m < TILE_HEADS // GROUP * GROUP) & (last == tl.load(pages_ptr + num_pages - 1))
        q_offset = row.to(tl.int64)[:, None] * q_stride + head_m[:, None] * HEAD_DIM + e[None, :]
        q = tl.load(q_ptr + q_offset, mask=valid[:, None], other=0.0)
        top = tl.full([TILE_HEADS], -1e30, tl.float32)
        total = tl.full([TILE_HEADS], 0.0, tl.float32)
        weighted = tl.full([TILE_HEADS, HEAD_DIM], 0.0, tl.float32)
        for index in range(split * num_pages // splits, (split + 1) * num_pages // splits):
            page = tl.load(pages_ptr + index).to(tl.int64)
            slot = (page * KV_HEADS + head) * PAGE + t
            offset = slot[:, None] * HEAD_DIM + e[None, :]
            k = tl.load(keys_ptr + offset)
            v = tl.load(values_ptr + offset)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            top, total, weighted = add_page(scores, v, top, total, weighted, PRECISION)
        part = (split * num_rows + row) * (KV_HEADS * GROUP) + head_m
        store_part(part_ptr, stats_ptr, part, top, total, weighted, valid)
