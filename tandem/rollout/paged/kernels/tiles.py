# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false, reportGeneralTypeIssues=false
"""Triton kernels: pages that several rows have in common are read once for a tile of rows.

The samples of a prompt have its full pages in common. A tile is adjacent rows of one prompt, as
many as have 64 query heads of a key/value head (``tile_heads``). Its pages are split among
programs; each row adds the parts that were found for it to what it finds in its own pages
(Hydragen, arXiv:2402.05099).

Shapes: B rows, H query heads, K key/value heads, G = H / K, E head dimension, M heads of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.rollout.paged.cache import LayerCache, RowTables, Tiles
from tandem.rollout.paged.kernels.parts import add_page, store_part

_SHARED_MEMORY = 96 << 10
"""The bytes of shared memory for the queries of a tile and the keys and values of a page."""


def tile_heads(head_dim: int, *, page_tokens: int, itemsize: int) -> int:
    """Return the query heads of a tile: 64, or fewer if heads are too wide for shared memory; at
    least 16.
    """
    room = _SHARED_MEMORY // (head_dim * itemsize) - 2 * page_tokens
    return 64 if room >= 64 else 32 if room >= 32 else 16


def make_tiles(rows: RowTables, tiles: Tiles, *, num_programs: int) -> None:
    """Fill ``tiles`` for the rows.

    Args:
        num_programs: programs of a key/value head among which pages are split.
    """
    num_rows = len(rows.position_B)
    _make_tiles[(1,)](
        rows.shared_B,
        rows.table_BN,
        tiles.num_pages_B,
        tiles.tile_B,
        tiles.row_B,
        tiles.counts_2,
        num_rows,
        num_programs,
        rows.shared_B.stride(0),
        rows.table_BN.stride(0),
        ROWS=triton.next_power_of_2(num_rows),
        TILE_ROWS=tiles.num_rows,
        MOST_SPLITS=tiles.most_splits(num_rows),
        num_warps=8,
    )


def attend_tiles(
    q_BHE: Tensor, cache: LayerCache, *, rows: RowTables, tiles: Tiles, num_programs: int
) -> None:
    """Attend to the pages of all tiles, and store a part for each split and row."""
    num_rows, num_heads, head_dim = q_BHE.shape
    kv_heads, page_tokens = cache.keys.shape[1:3]
    itemsize = q_BHE.dtype.itemsize
    _attend_tiles[(num_programs, kv_heads)](
        q_BHE,
        cache.keys,
        cache.values,
        rows.table_BN,
        tiles.num_pages_B,
        tiles.tile_B,
        tiles.row_B,
        tiles.counts_2,
        tiles.part_QHE,
        tiles.stats_QH2,
        num_rows,
        q_BHE.stride(0),
        rows.table_BN.stride(0),
        head_dim**-0.5,
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        TILE_HEADS=tile_heads(head_dim, page_tokens=page_tokens, itemsize=itemsize),
        HEAD_DIM=head_dim,
        PAGE=page_tokens,
        PRECISION="ieee" if q_BHE.dtype == torch.float32 else "tf32",
        num_warps=4 if head_dim <= 128 else 8,
        num_stages=2 if head_dim * itemsize <= 256 else 1,
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
    tile_ptr,
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
    tile = tl.cumsum(begins.to(tl.int32), 0) - 1
    tl.store(tile_ptr + row, tl.where(has_tile, tile, -1), mask=row < num_rows)
    tl.store(row_ptr + tile, row, mask=begins)
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
    num_pages_ptr,
    tile_ptr,
    row_ptr,
    counts_ptr,
    part_ptr,
    stats_ptr,
    num_rows,
    q_stride,
    table_stride,
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
        split, tile = item % splits, item // splits
        first = tl.load(row_ptr + tile)
        num_pages = tl.load(num_pages_ptr + first)
        pages_ptr = table_ptr + first.to(tl.int64) * table_stride
        row = first + m // GROUP
        inside = (row < num_rows) & (m < TILE_HEADS // GROUP * GROUP)
        valid = tl.load(tile_ptr + row, mask=inside, other=-1) == tile
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
