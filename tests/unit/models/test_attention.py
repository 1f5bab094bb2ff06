# SPDX-License-Identifier: Apache-2.0
"""Packed attention against attention under one mask over all T tokens."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tandem.models.attention import PackedAttention
from tandem.types import Segments
from tests.unit.models.tiny_models import (
    NATIVE,
    open_fp32,
    pack_separate,
    pack_shared,
    sample_sequences,
    write_hf,
)

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8


def full_mask(segments: Segments):
    """(T, T): which token sees which."""
    num_tokens = int(segments.length_S.sum())
    mask = torch.zeros(num_tokens, num_tokens, dtype=torch.bool)
    rows = (segments.start_S, segments.length_S, segments.prefix_start_S, segments.prefix_length_S)
    for start, length, prefix_start, prefix_length in torch.stack(rows, 1).tolist():
        own = slice(start, start + length)
        mask[own, own] = torch.ones(length, length, dtype=torch.bool).tril()
        mask[own, prefix_start : prefix_start + prefix_length] = True
    return mask


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(num_tokens, heads, HEAD_DIM, generator=generator).to(dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def reference(mask, q_THE, k_TKE, v_TKE):
    q, k, v = (x.transpose(0, 1) for x in (q_THE, k_TKE, v_TKE))
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 0) for x in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)


@pytest.mark.parametrize("pack", [pack_shared, pack_separate])
def test_outputs_and_gradients_equal_masked_attention(pack):
    segments = pack(*sample_sequences()).segments
    tensors = inputs(int(segments.length_S.sum()))
    ours = PackedAttention(segments)(0, *tensors)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    our_grads = torch.autograd.grad((ours * weights).sum(), tensors)
    theirs = reference(full_mask(segments), *tensors)
    their_grads = torch.autograd.grad((theirs * weights).sum(), tensors)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)
    torch.testing.assert_close(our_grads, their_grads, rtol=0, atol=1e-5)


def test_segments_of_very_different_lengths():
    length = torch.tensor([100, 1, 2, 50, 3, 99, 1, 20])
    start = length.cumsum(0) - length
    zero = torch.zeros_like(start)
    segments = Segments(start, length, zero, zero)
    tensors = inputs(int(length.sum()))
    theirs = reference(full_mask(segments), *tensors)
    torch.testing.assert_close(PackedAttention(segments)(0, *tensors), theirs, rtol=0, atol=1e-6)


def test_a_response_does_not_see_its_siblings():
    prompts, responses = sample_sequences()
    segments = pack_shared(prompts, responses).segments
    q, k, v = inputs(int(segments.length_S.sum()))
    attention = PackedAttention(segments)
    before = attention(0, q, k, v)
    first = slice(len(prompts[0]), len(prompts[0]) + len(responses[0][0]))
    with torch.no_grad():
        k[first] += 1.0
        v[first] += 1.0
    after = attention(0, q, k, v)
    unchanged = torch.ones(len(q), dtype=torch.bool)
    unchanged[first] = False
    assert torch.equal(before[unchanged], after[unchanged])
    assert not torch.equal(before[first], after[first])


def test_bfloat16_attention_is_near_that_of_float32():
    segments = pack_shared(*sample_sequences()).segments
    tensors = inputs(int(segments.length_S.sum()), torch.bfloat16)
    ours = PackedAttention(segments)(0, *tensors)
    theirs = reference(full_mask(segments), *(x.float() for x in tensors))
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours.float(), theirs, rtol=0, atol=3e-2)


def test_shared_prompts_change_no_hidden_state(tmp_path):
    write_hf(NATIVE["qwen3_tied"](), tmp_path)
    model = open_fp32(tmp_path)
    shared, separate = pack_shared(*sample_sequences()), pack_separate(*sample_sequences())
    grads = []
    hidden = []
    for packed in (shared, separate):
        hidden.append(model.hidden(packed)[packed.source_R])
        loss = hidden[-1].square().sum()
        grads.append(torch.autograd.grad(loss, model.decoder.layers[0].qkv.weight)[0])
    assert torch.equal(shared.target_R, separate.target_R)
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=1e-5)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-5 * float(grads[1].abs().max()))
