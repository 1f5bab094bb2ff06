# SPDX-License-Identifier: Apache-2.0
"""The arguments of packed flash attention: the keys and their order. The attention itself needs an
accelerator (tests/gpu). Precisions that it lacks use the generic implementation.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.models.attention import PackedAttention
from tandem.types import Segments
from tests.unit.models.tiny_models import pack_separate, pack_shared

PROMPTS = [[5, 60, 3], [44]]
RESPONSES = [[[7, 12], [2]], [[21, 8, 9]]]


@pytest.fixture
def varlen(fused):
    """Return the module under test."""
    return pytest.importorskip("tandem.models.kernels.varlen", reason="needs triton")


def draw(segments: Segments, device: torch.device, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return queries of four heads, keys and values of two."""
    num_tokens = int(segments.length_S.sum())
    return [torch.randn(num_tokens, heads, 8).to(device, dtype) for heads in (4, 2, 2)]


def test_keys_are_each_segments_prefix_and_then_its_own(varlen):
    segments = pack_shared(PROMPTS, RESPONSES).segments
    # Tokens: prompt 0-2, responses 3-4 and 5, prompt 6, response 7-9.
    prompt, other = [0, 1, 2], [6]
    expected = [*prompt, *prompt, 3, 4, *prompt, 5, *other, *other, 7, 8, 9]
    assert varlen._key_index(segments).tolist() == expected


def test_flash_is_given_where_segments_and_their_keys_start(varlen, device):
    shared = varlen.VarlenAttention(pack_shared(PROMPTS, RESPONSES).segments, device)
    query_starts, key_starts = (starts.tolist() for starts in shared._starts)
    assert query_starts == [0, 3, 5, 6, 7, 10]
    assert key_starts == [0, 3, 8, 12, 13, 17]
    assert shared._longest == (3, 5)
    separate = varlen.VarlenAttention(pack_separate(PROMPTS, RESPONSES).segments, device)
    assert separate._gather is None
    assert [starts.tolist() for starts in separate._starts] == [[0, 5, 9, 13]] * 2
    assert separate._longest == (5, 5)


def test_repeated_keys_attended_to_by_segments_are_the_generic_result(varlen, device):
    """Check plain attention over the arguments of flash attention."""
    segments = pack_shared(PROMPTS, RESPONSES).segments
    q_THE, k_TKE, v_TKE = draw(segments, device, dtype=torch.float64)
    attention = varlen.VarlenAttention(segments, device)
    k_YKE, v_YKE = (attention._gather(x).repeat_interleave(2, 1) for x in (k_TKE, v_TKE))
    expected_THE = PackedAttention(segments, device)(0, q_THE, k_TKE, v_TKE)
    starts = list(zip(*(starts.tolist() for starts in attention._starts), strict=True))
    for (q_start, k_start), (q_stop, k_stop) in zip(starts, starts[1:], strict=False):
        q, k, v = q_THE[q_start:q_stop], k_YKE[k_start:k_stop], v_YKE[k_start:k_stop]
        scores = torch.einsum("qhe,khe->hqk", q, k) * 8**-0.5
        hidden = torch.ones(len(q), len(k), device=device).triu(len(k) - len(q) + 1).bool()
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        o_THE = torch.einsum("hqk,khe->qhe", weights, v)
        torch.testing.assert_close(o_THE, expected_THE[q_start:q_stop])


@pytest.mark.parametrize("pack", [pack_shared, pack_separate])
def test_full_precision_goes_the_generic_way(pack, varlen, device):
    segments = pack(PROMPTS, RESPONSES).segments
    attention = varlen.VarlenAttention(segments, device)
    generic = PackedAttention(segments, device)
    for layer in range(2):
        q_THE, k_TKE, v_TKE = draw(segments, device, dtype=torch.float32)
        expected_THE = generic(layer, q_THE, k_TKE, v_TKE)
        assert torch.equal(attention(layer, q_THE, k_TKE, v_TKE), expected_THE)


def test_full_precision_of_patches_goes_the_generic_way(varlen, device):
    lengths = np.array([4, 2, 4, 1])
    q_NHE, k_NHE, v_NHE = torch.randn(3, 11, 4, 8).to(device).unbind()
    found = varlen.VarlenRunAttention(lengths, device)(q_NHE, k_NHE, v_NHE=v_NHE)
    expected = [
        F.scaled_dot_product_attention(*(x.transpose(0, 1) for x in run)).transpose(0, 1)
        for run in zip(*(x.split(lengths.tolist()) for x in (q_NHE, k_NHE, v_NHE)), strict=True)
    ]
    torch.testing.assert_close(found.view(11, 4, 8), torch.cat(expected))
