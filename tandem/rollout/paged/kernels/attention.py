# SPDX-License-Identifier: Apache-2.0
# pyright: reportCallIssue=false
"""Triton kernels: one new token per row attends to its pages and is stored in the cache.

The pages of all rows form one list, divided evenly among as many programs as run concurrently
(stream-K, arXiv:2301.03598; LeanAttention, arXiv:2405.10480): rows of all lengths keep the device
busy to the end. Rows that several programs read are merged from parts. The list is divided once per
step. Rows that are not active store nothing and read no page. Softmax and sums are fp32. Pages that
tiles of rows have read (``tiles.py``) are not in the list.

Shapes: B rows, H query heads, K key/value heads, G = H / K, E head dimension, P tokens of a page, N
pages of a block table, S programs of a key/value head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tandem.rollout.paged.cache import LayerCache, PageDivision, RowTables, Tiles
from tandem.rollout.paged.kernels.parts import add_page, add_parts, store_part
from tandem.rollout.paged.kernels.tiles import attend_tiles, make_tiles

_MIN_DOT_ROWS = 16
_MERGED_PARTS = 8
"""The number of parts that ``_merge`` loads at a time."""


def num_programs(head_dim: int, *, kv_heads: int, num_multiprocessors: int) -> int:
    """Return how many programs per key/value head keep the device busy in one wave."""
    at_a_time = 6 if head_dim <= 64 else 4 if head_dim <= 128 else 2  # by their registers
    return max(1, at_a_time * num_multiprocessors // kv_heads)


def divide_pages(rows: RowTables) -> None:
    """Fill ``rows.division`` and ``rows.tiles`` for the current positions of the rows."""
    division, num_rows, tiles = rows.division, len(rows.position_B), rows.tiles
    programs = len(division.row_S)
    if tiles is not None:
        make_tiles(rows, tiles, num_programs=programs)
    _divide[(1,)](
        rows.position_B,
        rows.active_B,
        division.end_B if tiles is None else tiles.num_pages_B,
        division.end_B,
        division.begin_S,
        division.row_S,
        num_rows,
        programs,
        rows.position_B.stride(0),
        PAGE=division.page_tokens,
        ROWS=triton.next_power_of_2(num_rows),
        PROGRAMS=triton.next_power_of_2(programs + 1),
        TILED=tiles is not None,
        num_warps=8,
    )


def decode_attention(
    q_BHE: Tensor, k_BKE: Tensor, *, v_BKE: Tensor, cache: LayerCache, rows: RowTables
) -> Tensor:
    """Store k and v at each row's position. Return attention to all positions up to it (B, H, E).

    Call ``divide_pages`` for these positions first.
    """
    num_rows, num_heads, head_dim = q_BHE.shape
    kv_heads = k_BKE.shape[1]
    group = num_heads // kv_heads
    division = rows.division
    programs = len(division.row_S)
    o_BHE = torch.empty((num_rows, num_heads, head_dim), dtype=q_BHE.dtype, device=q_BHE.device)
    tiles = rows.tiles
    if tiles is not None:
        attend_tiles(q_BHE, cache, rows=rows, tiles=tiles, num_programs=programs)
    _attend[(programs, kv_heads)](
        q_BHE,
        k_BKE,
        v_BKE,
        cache.keys,
        cache.values,
        rows.table_BN,
        rows.position_B,
        rows.active_B,
        division.end_B,
        division.begin_S,
        division.row_S,
        o_BHE,
        division.part_S2HE,
        division.stats_S2H2,
        *_found_by(tiles, division),
        num_rows * num_heads,
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
        PAGE=division.page_tokens,
        PRECISION="ieee" if q_BHE.dtype == torch.float32 else "tf32",
        TILED=tiles is not None,
        num_warps=2 if head_dim <= 128 else 4,
        num_stages=3,
    )
    if programs > 1:
        _merge[(programs - 1, num_heads)](
            division.end_B,
            division.begin_S,
            division.row_S,
            division.part_S2HE,
            division.stats_S2H2,
            o_BHE,
            programs,
            HEADS=num_heads,
            HEAD_DIM=head_dim,
            PARTS=_MERGED_PARTS,
            num_warps=1,
        )
    return o_BHE


def _found_by(tiles: Tiles | None, division: PageDivision) -> tuple[Tensor, ...]:
    """Return what tiles have found; without tiles, tensors that nobody reads."""
    if tiles is None:
        return division.end_B, division.end_B, division.part_S2HE, division.stats_S2H2
    return tiles.num_pages_B, tiles.counts_2, tiles.part_QHE, tiles.stats_QH2


@triton.jit
def _position(position_ptr, active_ptr, offset, mask):
    """Load positions, -1 for a row that is not active."""
    active = tl.load(active_ptr + offset, mask=mask, other=0) != 0
    position = tl.load(position_ptr + offset, mask=mask, other=0)
    return tl.where(active, position, -1).to(tl.int32)


@triton.jit
def _divide(
    position_ptr,
    active_ptr,
    num_tiled_ptr,
    end_ptr,
    begin_ptr,
    row_ptr,
    num_rows,
    num_programs,
    state_stride,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    TILED: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    valid = row < num_rows
    position = _position(position_ptr, active_ptr, row * state_stride, valid)
    num_pages = tl.cdiv(position, PAGE)
    if TILED:
        num_pages -= tl.load(num_tiled_ptr + row, mask=valid, other=0)
    # A row without pages counts as one page, because a program must compute its new token.
    pages = tl.where(valid, tl.maximum(num_pages, 1), 0).to(tl.int64)
    end = tl.cumsum(pages, 0)
    total = tl.sum(pages, 0)
    tl.store(end_ptr + row, end.to(tl.int32), mask=valid)
    used = tl.minimum(total, num_programs)
    program = tl.arange(0, PROGRAMS)
    begin = tl.minimum(program, used) * total // used  # unused programs start at the end
    tl.store(begin_ptr + program, begin.to(tl.int32), mask=program <= num_programs)
    first = tl.cdiv((end - pages) * used, total)  # the first program that begins in this row
    last = tl.cdiv(end * used, total)  # and the first of a later one
    for index in range(0, tl.max(last - first, 0)):
        tl.store(row_ptr + first + index, row, mask=first + index < last)


@triton.jit
def _start(q, k_new, v_new, is_first, scale):
    """Return the largest score, the sum of weights and the weighted sum of values of a part that
    has the new token or, if it is not the first one, nothing.
    """
    own = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
    top = tl.where(is_first, own, -1e30)
    total = tl.where(is_first, tl.full([q.shape[0]], 1.0, tl.float32), 0.0)
    return top, total, total[:, None] * v_new.to(tl.float32)[None, :]


@triton.jit
def _store(
    k_new, v_new, keys_ptr, values_ptr, pages_ptr, position, head, KV_HEADS, PAGE: tl.constexpr
):
    """Store the new token of a row in its last page."""
    e = tl.arange(0, k_new.shape[0])
    page = tl.load(pages_ptr + position // PAGE).to(tl.int64)
    slot = ((page * KV_HEADS + head) * PAGE + position % PAGE) * k_new.shape[0] + e
    tl.store(keys_ptr + slot, k_new)
    tl.store(values_ptr + slot, v_new)


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
    end_ptr,
    begin_ptr,
    row_ptr,
    out_ptr,
    part_ptr,
    stats_ptr,
    num_tiled_ptr,
    tile_counts_ptr,
    found_ptr,
    found_stats_ptr,
    part_stride,
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
    PRECISION: tl.constexpr,
    TILED: tl.constexpr,
):
    program = tl.program_id(0)
    head = tl.program_id(1)
    here = tl.load(begin_ptr + program)
    stop = tl.load(begin_ptr + program + 1)
    row = tl.load(row_ptr + program)
    if here == stop:
        return
    g = tl.arange(0, GROUP_ROWS)
    e = tl.arange(0, HEAD_DIM)
    t = tl.arange(0, PAGE)
    valid_g, head_g = g < GROUP, head * GROUP + g
    while here < stop:
        row_begin = tl.load(end_ptr + row - 1, mask=row > 0, other=0)
        row_end = tl.load(end_ptr + row)
        here_end = tl.minimum(stop, row_end)
        position = _position(position_ptr, active_ptr, row * state_stride, True)
        pages_ptr = table_ptr + row.to(tl.int64) * table_stride
        q_offset = row.to(tl.int64) * q_stride + head_g[:, None] * HEAD_DIM + e[None, :]
        q = tl.load(q_ptr + q_offset, mask=valid_g[:, None], other=0.0)
        # The new token is in registers. The first part starts from it, other parts from zero.
        k_new = tl.load(k_ptr + row.to(tl.int64) * k_stride + head * HEAD_DIM + e)
        v_new = tl.load(v_ptr + row.to(tl.int64) * v_stride + head * HEAD_DIM + e)
        is_first = here == row_begin
        top, total, weighted = _start(q, k_new, v_new, is_first, scale)
        if is_first & (position >= 0):
            _store(k_new, v_new, keys_ptr, values_ptr, pages_ptr, position, head, KV_HEADS, PAGE)
        if TILED:
            num_tiled = tl.load(num_tiled_ptr + row)
            row_begin -= num_tiled
            place = row * (KV_HEADS * GROUP) + head_g
            parts = tl.where(is_first & (num_tiled > 0), tl.load(tile_counts_ptr + 1), 0)
            top, total, weighted = add_parts(
                top, total, weighted, found_ptr, found_stats_ptr, place, parts, part_stride, valid_g
            )

        num_pages = tl.cdiv(position, PAGE)
        for index in range(here - row_begin, tl.minimum(here_end - row_begin, num_pages)):
            page = tl.load(pages_ptr + index).to(tl.int64)
            inside = (index * PAGE + t) < position
            slot = (page * KV_HEADS + head) * PAGE + t
            offset = slot[:, None] * HEAD_DIM + e[None, :]
            k = tl.load(keys_ptr + offset, mask=inside[:, None], other=0.0)
            v = tl.load(values_ptr + offset, mask=inside[:, None], other=0.0)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
            scores = tl.where(inside[None, :], scores, -1e30)
            top, total, weighted = add_page(scores, v, top, total, weighted, PRECISION)

        if is_first & (here_end == row_end):
            o = (weighted / total[:, None]).to(out_ptr.dtype.element_ty)
            heads_ptr = out_ptr + row.to(tl.int64) * KV_HEADS * GROUP * HEAD_DIM
            tl.store(heads_ptr + head_g[:, None] * HEAD_DIM + e[None, :], o, mask=valid_g[:, None])
        else:
            part = (program * 2 + is_first.to(tl.int32)) * (KV_HEADS * GROUP) + head_g
            store_part(part_ptr, stats_ptr, part, top, total, weighted, valid_g)
        here = here_end
        row += 1


@triton.jit
def _merge(
    end_ptr,
    begin_ptr,
    row_ptr,
    part_ptr,
    stats_ptr,
    out_ptr,
    num_programs,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Merge the parts of the row whose second program this is, if there is such a row."""
    program = tl.program_id(0) + 1
    head = tl.program_id(1)
    begin_before = tl.load(begin_ptr + program - 1)
    begin = tl.load(begin_ptr + program)
    row = tl.load(row_ptr + program)
    if begin == tl.load(begin_ptr + program + 1):
        return
    row_begin = tl.load(end_ptr + row - 1, mask=row > 0, other=0)
    row_end = tl.load(end_ptr + row)
    if (begin == row_begin) | (begin_before > row_begin):
        return
    e = tl.arange(0, HEAD_DIM)
    top = tl.full([1], -1e30, tl.float32)
    total_weight = tl.full([1], 0.0, tl.float32)
    weighted = tl.full([HEAD_DIM], 0.0, tl.float32)
    first = program - 1
    while tl.load(begin_ptr + tl.minimum(first, num_programs)) < row_end:
        s = first + tl.arange(0, PARTS)
        valid = tl.load(begin_ptr + s, mask=s < num_programs, other=row_end) < row_end
        part = (s * 2 + (s == program - 1).to(tl.int32)) * HEADS + head
        part_top = tl.load(stats_ptr + part * 2, mask=valid, other=-1e30)
        part_weight = tl.load(stats_ptr + part * 2 + 1, mask=valid, other=0.0)
        offset = part[:, None] * HEAD_DIM + e[None, :]
        part_weighted = tl.load(part_ptr + offset, mask=valid[:, None], other=0.0)
        new_top = tl.maximum(top, tl.max(part_top, 0))
        decay = tl.exp(top - new_top)
        factor = tl.exp(part_top - new_top)
        weighted = weighted * decay + tl.sum(part_weighted * factor[:, None], 0)
        total_weight = total_weight * decay + tl.sum(part_weight * factor, 0)
        top = new_top
        first += PARTS
    out = (weighted / total_weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row.to(tl.int64) * HEADS + head) * HEAD_DIM + e, out)
