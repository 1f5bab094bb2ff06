# SPDX-License-Identifier: Apache-2.0
"""Decode attention over the cache against plain attention over each row's own tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.rollout.native.attention import DecodeAttention, PrefillAttention
from tandem.rollout.native.cache import RowCache
from tandem.rollout.packing import Packed, pack
from tandem.rollout.settings import CacheShape

HEADS, KV_HEADS, WIDTH = 6, 2, 8
SHAPE = CacheShape(
    num_layers=1,
    num_kv_heads=KV_HEADS,
    head_dim=WIDTH,
    dtype=torch.float32,
    device=torch.device("cpu"),
)


def _packed(lengths: Sequence[int]) -> Packed:
    nowhere = [0] * len(lengths)
    runs = [range(length) for length in lengths]
    return pack(runs, nowhere, prefix_starts=nowhere, device=torch.device("cpu"))


def _full(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Attention of one query (H, E) to keys and values (T, K, E)."""
    q, k, v = query[:, None], keys.transpose(0, 1), values.transpose(0, 1)
    return F.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=True)[0, :, 0]


@pytest.mark.parametrize("lengths", [[4, 4], [2, 5, 1]])
def test_each_row_attends_to_its_own_tokens(lengths: list[int]) -> None:
    num_tokens, num_rows = sum(lengths), len(lengths)
    keys, values = torch.randn(2, num_tokens, KV_HEADS, WIDTH).unbind()
    prefill = PrefillAttention(_packed(lengths))
    assert prefill(0, torch.randn(num_tokens, HEADS, WIDTH), keys, values).shape[0] == num_tokens
    cache = RowCache(SHAPE)
    cache.reserve(num_rows, range(-max(lengths), 4), live_rows=0)
    for row, stop in enumerate(itertools.accumulate(lengths)):
        tokens = slice(stop - lengths[row], stop)
        cache.write(slice(row, row + 1), prefill.states(), tokens=tokens, column=0)
    cache.facts_4R[0, :num_rows] = -torch.tensor(lengths)
    masked = len(set(lengths)) > 1
    attention = DecodeAttention(cache, num_rows, first_column=-max(lengths), masked=masked)
    own = list(zip(keys.split(lengths), values.split(lengths), strict=True))
    for column in range(3):
        query = torch.randn(num_rows, HEADS, WIDTH)
        key, value = torch.randn(2, num_rows, KV_HEADS, WIDTH).unbind()
        attention.column = column
        actual = attention(0, query, key, value)
        own = [
            (torch.cat((k, key[i : i + 1])), torch.cat((v, value[i : i + 1])))
            for i, (k, v) in enumerate(own)
        ]
        expected = torch.stack([_full(query[i], *own[i]) for i in range(num_rows)])
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6)


def test_runs_attend_to_what_is_before_them() -> None:
    """Two responses behind a prompt of 4 tokens and one behind another of 3, against whole ones."""
    prompts, responses = (4, 3), ((2, 0), (1, 0), (3, 1))
    keys, values = torch.randn(2, sum(prompts), KV_HEADS, WIDTH).unbind()
    prefill = PrefillAttention(_packed(prompts))
    prefill(0, torch.randn(sum(prompts), HEADS, WIDTH), keys, values)
    lengths = [length for length, _ in responses]
    queries = torch.randn(sum(lengths), HEADS, WIDTH)
    own_keys, own_values = torch.randn(2, sum(lengths), KV_HEADS, WIDTH).unbind()
    packed = pack(
        [range(length) for length in lengths],
        [prompts[prompt] for _, prompt in responses],
        prefix_starts=[(0, prompts[0])[prompt] for _, prompt in responses],
        device=torch.device("cpu"),
    )
    actual = PrefillAttention(packed, prefill.states())(0, queries, own_keys, own_values)
    token = 0
    for length, prompt in responses:
        before, own = slice(4 * prompt, 4 + 3 * prompt), slice(token, token + length)
        for index in range(length):
            seen = slice(token, token + index + 1)
            expected = _full(
                queries[own][index],
                torch.cat((keys[before], own_keys[seen])),
                torch.cat((values[before], own_values[seen])),
            )
            torch.testing.assert_close(actual[own][index], expected, rtol=0, atol=1e-6)
        token += length
