# SPDX-License-Identifier: Apache-2.0
"""Attention of one new token a row over pages, against the same in plain torch in fp64."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.rollout.paged.cache import (
    PAGE_TOKENS,
    LayerCache,
    PageDivision,
    RowState,
    RowTables,
    Tiles,
)
from tandem.rollout.paged.kernels.attention import decode_attention, divide_pages, num_programs
from tandem.rollout.paged.kernels.tiles import tile_heads

TILED = pytest.mark.parametrize("tiled", [False, True], ids=["each row", "in tiles"])
UNUSED = float("nan")
"""What stands where nobody may read."""


@dataclass
class Case:
    """One step: what enters, what the pages hold, and what each row knows."""

    q_BHE: Tensor
    k_BKE: Tensor
    v_BKE: Tensor
    cache: LayerCache
    rows: RowTables


@dataclass(frozen=True)
class Sizes:
    """Heads of a case, and among how many programs a key/value head its pages are divided."""

    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    programs: int = 1
    dtype: torch.dtype = torch.float32


def _case(positions: list[int], sizes: Sizes, *, device: torch.device) -> Case:
    """Rows with pages in random order; a negative position is an inactive row."""
    num_rows, heads, kv_heads = len(positions), sizes.kv_heads * sizes.group, sizes.kv_heads
    table_pages = max(positions) // PAGE_TOKENS + 1
    num_pages = num_rows * table_pages + 1
    shape = (num_pages, kv_heads, PAGE_TOKENS, sizes.head_dim)
    layer = LayerCache(torch.randn(shape), torch.randn(shape))
    table = torch.randperm(num_pages)[:-1].view(num_rows, table_pages)
    state = RowState.allocate(num_rows, torch.device("cpu"))
    for row, position in enumerate(positions):
        state.numbers[row, RowState.POSITION] = max(position, 0)
        state.numbers[row, RowState.ACTIVE] = int(position >= 0)
    # q, k and v are slices of one tensor, as in the decoder.
    qkv = torch.randn(num_rows, heads + 2 * kv_heads, sizes.head_dim).to(device, sizes.dtype)
    q_BHE, k_BKE, v_BKE = qkv.split((heads, kv_heads, kv_heads), 1)
    numbers = state.numbers.to(device)
    division = PageDivision.allocate(
        num_rows,
        sizes.programs,
        num_heads=heads,
        head_dim=sizes.head_dim,
        device=device,
    )
    division.part_S2HE.fill_(UNUSED)
    division.stats_S2H2.fill_(UNUSED)
    rows = RowTables(
        table.to(device, torch.int32),
        numbers[:, RowState.POSITION],
        numbers[:, RowState.ACTIVE],
        numbers[:, RowState.SHARED],
        division,
    )
    cache = LayerCache(layer.keys.to(device, sizes.dtype), layer.values.to(device, sizes.dtype))
    return Case(q_BHE, k_BKE, v_BKE, cache, rows)


def _expected(case: Case, row: int) -> Tensor:
    """(H, E) of one row, from the pages as they are after the step."""
    length = int(case.rows.position_B[row]) + 1
    group = case.q_BHE.shape[1] // case.k_BKE.shape[1]
    pages = case.rows.table_BN[row].long()
    keys, values = (
        pool[pages].transpose(1, 2).flatten(0, 1)[:length].repeat_interleave(group, 1).double()
        for pool in (case.cache.keys, case.cache.values)
    )
    q_HE = case.q_BHE[row].double()
    scores_HT = torch.einsum("he,the->ht", q_HE, keys) * q_HE.shape[-1] ** -0.5
    return torch.einsum("ht,the->he", scores_HT.softmax(-1), values)


def _check(case: Case, *, atol: float = 1e-5) -> None:
    """Results of active rows; every page as before but for the active rows' new entries."""
    pools = (case.cache.keys, case.cache.values)
    before = [pool.clone() for pool in pools]
    divide_pages(case.rows)
    o_BHE = decode_attention(
        case.q_BHE, case.k_BKE, v_BKE=case.v_BKE, cache=case.cache, rows=case.rows
    ).double()
    for row in case.rows.active_B.nonzero()[:, 0].tolist():
        position = int(case.rows.position_B[row])
        page, slot = int(case.rows.table_BN[row, position // PAGE_TOKENS]), position % PAGE_TOKENS
        for pool, new in zip(before, (case.k_BKE, case.v_BKE), strict=True):
            pool[page, :, slot] = new[row]
    for pool, wanted in zip(pools, before, strict=True):
        assert torch.equal(pool, wanted)
    for row in case.rows.active_B.nonzero()[:, 0].tolist():
        torch.testing.assert_close(o_BHE[row], _expected(case, row), rtol=0, atol=atol)


@pytest.mark.parametrize("group", range(1, 9))
def test_any_number_of_query_heads_a_key_head(group: int, device: torch.device) -> None:
    _check(_case([70], Sizes(kv_heads=2, group=group), device=device))


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_contexts_across_page_borders(programs: int, device: torch.device) -> None:
    positions = [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, 2 * PAGE_TOKENS + 1]
    if programs == 1:
        positions += [PAGE_TOKENS + 1, 2 * PAGE_TOKENS - 1, 2 * PAGE_TOKENS]
    _check(_case(positions, Sizes(kv_heads=1, programs=programs), device=device))


@pytest.mark.parametrize("programs", [2, 3, 4, 99])
def test_short_and_long_contexts_side_by_side(programs: int, device: torch.device) -> None:
    """1, 2, 3 and 22 pages: three programs take 9, 9 and 10, so that two of them begin in the last
    row; of 99 as many as there are pages have work."""
    positions = [3, 2 * PAGE_TOKENS, 2 * PAGE_TOKENS + 1, 21 * PAGE_TOKENS + 7]
    _check(_case(positions, Sizes(kv_heads=1, programs=programs), device=device))


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "multiprocessors", "expected"),
    [(64, 2, 132, 396), (128, 2, 132, 264), (128, 8, 132, 66), (256, 1, 132, 264), (64, 8, 1, 1)],
)
def test_heads_share_the_programs_of_a_device(
    head_dim: int, kv_heads: int, multiprocessors: int, expected: int
) -> None:
    found = num_programs(head_dim, kv_heads=kv_heads, num_multiprocessors=multiprocessors)
    assert found == expected


@pytest.mark.parametrize("seed", range(3))
def test_programs_have_equal_parts_of_all_pages(seed: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(-1, 40 * PAGE_TOKENS, (11,), generator=generator).tolist()
    rows = _case(positions, Sizes(kv_heads=1, programs=7), device=device).rows
    divide_pages(rows)
    found = rows.division
    owners = [row for row, at in enumerate(positions) for _ in range(max(1, -(-at // PAGE_TOKENS)))]
    assert found.end_B.tolist() == torch.bincount(torch.tensor(owners)).cumsum(0).tolist()
    assert found.begin_S.tolist() == [i * len(owners) // 7 for i in range(8)]
    assert found.row_S.tolist() == [owners[i * len(owners) // 7] for i in range(7)]


@pytest.mark.parametrize("programs", [1, 3])
def test_inactive_rows_store_nothing_and_read_no_page(programs: int, device: torch.device) -> None:
    case = _case([-1, 66, -1], Sizes(kv_heads=1, programs=programs), device=device)
    case.rows.position_B[0] = 5
    case.rows.table_BN[0] = case.rows.table_BN[1]  # pages that are another's by now
    owned = set(case.rows.table_BN.flatten().tolist())
    case.rows.table_BN[2] = next(i for i in range(len(case.cache.keys)) if i not in owned)
    _check(case)


def test_what_is_beyond_the_context_is_not_looked_at(device: torch.device) -> None:
    case = _case([PAGE_TOKENS + 3], Sizes(), device=device)
    last = int(case.rows.table_BN[0, 1])
    case.cache.keys[last, :, 4:] = 1e4
    case.cache.values[last, :, 4:] = 1e4
    _check(case)


@TILED
def test_large_scores_do_not_overflow(tiled: bool, device: torch.device) -> None:
    case = _case([180, 190], Sizes(kv_heads=1, programs=2), device=device)
    if tiled:
        _share(case, [Group(2, 2)])
    case.q_BHE.mul_(1000)
    case.k_BKE.mul_(-1000)
    _check(case, atol=1e-4)


@TILED
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_half_precision_and_larger_heads(head_dim: int, tiled: bool, device: torch.device) -> None:
    # The interpreter multiplies matrices of bf16 as if their bits were integers.
    dtype = torch.float16 if device.type == "cpu" else torch.bfloat16
    sizes = Sizes(kv_heads=1, group=7, head_dim=head_dim, programs=2, dtype=dtype)
    case = _case([190] * 3, sizes, device=device)
    if tiled:
        _share(case, [Group(3, 2)])
    _check(case, atol=2e-2)


@dataclass(frozen=True)
class Group:
    """Adjacent rows that are samples of a prompt, and how many pages it fills."""

    num_rows: int
    num_pages: int


def _share(case: Case, groups: list[Group]) -> Tiles:
    """Let the rows of each group have the pages of its first row in common, and tiles read them."""
    rows, row = case.rows, 0
    for group in groups:
        some = slice(row, row + group.num_rows)
        rows.table_BN[some, : group.num_pages] = rows.table_BN[row, : group.num_pages].clone()
        rows.shared_B[some] = group.num_pages
        row += group.num_rows
    num_rows, num_heads, head_dim = case.q_BHE.shape
    assert row == num_rows
    device = case.q_BHE.device
    heads = tile_heads(head_dim, page_tokens=PAGE_TOKENS, itemsize=case.q_BHE.dtype.itemsize)
    tiles = Tiles.allocate(
        num_rows,
        rows_of_tile=heads // (num_heads // case.k_BKE.shape[1]),
        num_heads=num_heads,
        head_dim=head_dim,
        device=device,
    )
    tiles.part_QHE.fill_(UNUSED)
    tiles.stats_QH2.fill_(UNUSED)
    case.rows = replace(rows, tiles=tiles)
    return tiles


@pytest.mark.parametrize("programs", [1, 3, 40])
@pytest.mark.parametrize("group", [1, 3, 7])
def test_pages_of_a_prompt_are_read_once(programs: int, group: int, device: torch.device) -> None:
    """Groups of one row, of more rows than a tile has, without a full page, and of 11 pages, which
    40 programs split into parts."""
    groups = [Group(1, 2), Group(12, 1), Group(2, 11), Group(3, 0), Group(2, 2)]
    ages = [0, 1, PAGE_TOKENS - 1, PAGE_TOKENS, 70]
    prompts = [part.num_pages * PAGE_TOKENS for part in groups for _ in range(part.num_rows)]
    positions = [prompt + ages[row % len(ages)] for row, prompt in enumerate(prompts)]
    case = _case(positions, Sizes(kv_heads=2, group=group, programs=programs), device=device)
    tiles = _share(case, groups)
    _check(case)
    assert tiles.num_pages_B.tolist() == [0] + [1] * 12 + [11] * 2 + [0] * 3 + [2] * 2


def test_a_tile_ends_with_its_rows(device: torch.device) -> None:
    """64 heads are 9 rows of 7. Rows of another prompt of as many pages are not of the tile."""
    case = _case([70] * 23, Sizes(kv_heads=1, group=7, programs=3), device=device)
    tiles = _share(case, [Group(10, 1), Group(10, 1), Group(1, 1), Group(2, 1)])
    _check(case)
    assert tiles.counts_2.tolist() == [5, 1]
    assert tiles.row_B[:5].tolist() == [0, 9, 10, 19, 21]


def test_inactive_rows_in_and_behind_a_group_change_nothing(device: torch.device) -> None:
    case = _case([130, -1, 135, -1, 140, -1], Sizes(kv_heads=1, programs=4), device=device)
    tiles = _share(case, [Group(5, 2), Group(1, 0)])
    case.rows.position_B[[1, 3]] = 128
    case.rows.table_BN[5] = case.rows.table_BN[4]  # what an earlier row has left there
    _check(case)
    assert tiles.num_pages_B.tolist() == [2, 2, 2, 2, 2, 0]


def test_a_tile_has_two_rows_with_the_largest_group(device: torch.device) -> None:
    sizes = Sizes(kv_heads=1, group=32, programs=2)
    case = _case([70] * 4, sizes, device=device)
    tiles = _share(case, [Group(4, 1)])
    _check(case)
    assert tiles.row_B[:2].tolist() == [0, 2]
