# SPDX-License-Identifier: Apache-2.0
"""The row cache: what survives growing, shifting and compaction, and how prompts are copied."""

from __future__ import annotations

import torch

from tandem.rollout.native.cache import RowCache, TokenStates
from tandem.rollout.settings import CacheShape

SHAPE = CacheShape(
    num_layers=2, num_kv_heads=2, head_dim=3, dtype=torch.float32, device=torch.device("cpu")
)


def _filled(num_rows: int, columns: range) -> RowCache:
    """Every number tells its row and column: 100 x row + column."""
    cache = RowCache(SHAPE)
    cache.reserve(num_rows, columns, live_rows=0)
    mark_RC = 100.0 * torch.arange(num_rows)[:, None] + torch.tensor(list(columns))
    for key, value in zip(cache.keys, cache.values, strict=True):
        key.copy_(mark_RC[:, None, None])
        value.copy_(mark_RC[:, None, :, None])
    cache.tokens_RC.copy_(mark_RC)
    cache.logp_RC.copy_(mark_RC)
    cache.facts_4R.copy_(torch.arange(num_rows).expand(4, -1))
    cache.uniform_RJ.copy_(torch.arange(num_rows)[:, None].expand_as(cache.uniform_RJ))
    return cache


def _assert_holds(cache: RowCache, expected: dict[int, int], columns: range) -> None:
    """``expected`` maps a row to the row it was marked as."""
    where = cache.index(columns)
    for row, mark in expected.items():
        wanted = 100.0 * mark + torch.tensor(list(columns), dtype=torch.float32)
        for key, value in zip(cache.keys, cache.values, strict=True):
            assert torch.equal(key[row, :, :, where], wanted.expand(2, 3, -1))
            assert torch.equal(value[row, :, where], wanted[:, None].expand(2, -1, 3))
        assert torch.equal(cache.tokens_RC[row, where], wanted.long())
        assert torch.equal(cache.logp_RC[row, where], wanted)
        assert cache.facts_4R[:, row].tolist() == [mark] * 4
        assert float(cache.uniform_RJ[row, -1]) == mark


def test_bytes_per_token_counts_keys_and_values_of_all_layers() -> None:
    assert SHAPE.bytes_per_token == 2 * 2 * 2 * 3 * 4


def test_growing_keeps_live_rows() -> None:
    cache = _filled(3, range(-4, 2))
    cache.reserve(5, range(-2, 12), live_rows=2)
    _assert_holds(cache, {0: 0, 1: 1}, range(-2, 2))
    assert cache.has_room(5, range(-2, 12)) and not cache.has_room(5, range(-3, 12))
    assert not cache.has_room(6, range(-2, 12))


def test_shifting_in_either_direction_keeps_live_rows_and_memory() -> None:
    for columns, kept in ((range(3, 9), range(3, 6)), (range(-2, 4), range(0, 4))):
        cache = _filled(3, range(0, 6))
        pointer = cache.keys[0].data_ptr()
        cache.reserve(3, columns, live_rows=3)
        assert (cache.keys[0].data_ptr(), cache.first_column) == (pointer, columns.start)
        _assert_holds(cache, {0: 0, 1: 1, 2: 2}, kept)


def test_moved_rows_bring_everything_along() -> None:
    cache = _filled(5, range(10, 16))
    cache.move_rows([4, 3], [0, 2], columns=range(10, 16))
    _assert_holds(cache, {0: 4, 1: 1, 2: 3}, range(10, 16))


def test_prompts_end_before_the_current_column_of_their_rows() -> None:
    cache = RowCache(SHAPE)
    cache.reserve(4, range(0, 8), live_rows=0)
    key_KET = torch.randn(2, 3, 5)
    states = TokenStates((key_KET, -key_KET), (key_KET.mT, -key_KET.mT))
    cache.write(slice(1, 2), states, tokens=slice(0, 2), column=6)
    cache.write(slice(2, 4), states, tokens=slice(2, 5), column=6)
    for row, tokens, columns in ((1, slice(0, 2), slice(4, 6)), (3, slice(2, 5), slice(3, 6))):
        assert torch.equal(cache.keys[0][row, :, :, columns], key_KET[..., tokens])
        assert torch.equal(cache.values[1][row, :, columns], -key_KET.mT[:, tokens])
    assert torch.equal(cache.keys[0][2], cache.keys[0][3])
    read = cache.read([(3, range(4, 6)), (1, range(4, 5))])
    assert torch.equal(read.keys[1], -key_KET[..., [3, 4, 0]])
    assert torch.equal(read.values[0], key_KET.mT[:, [3, 4, 0]])
    assert torch.equal(states.part(slice(2, 5)).keys[1], -key_KET[..., 2:])
