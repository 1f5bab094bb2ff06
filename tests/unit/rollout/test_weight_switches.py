# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the native engine generates: tokens are kept, the rest is drawn under
the new weights, and every token says which version drew it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.types import Completion, GenerationRequest, SamplingParams, Segments
from tests.fakes.tiny_decoder import tiny_decoder

SEED = 11
SAMPLED = SamplingParams(temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=12, ignore_eos=True)
CONFIG = NativeRolloutConfig(
    seed=SEED, eos_ids=(0,), max_num_seqs=64, max_num_batched_tokens=512, max_cache_bytes=1 << 30
)
REQUESTS = [
    GenerationRequest((0, 1), (5, 6, 7), SAMPLED),
    GenerationRequest((2,), (9,), SAMPLED),
    GenerationRequest((3, 4), (8, 3, 2, 11, 30), replace(SAMPLED, max_new_tokens=7)),
]
PROMPTS = {i: request.prompt_ids for request in REQUESTS for i in request.sample_ids}


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Two layers, four heads over two key/value heads, weights large enough for variety."""
    return tiny_decoder()


@contextmanager
def other_weights(decoder: Decoder) -> Iterator[None]:
    """Version 1: all matrices of the layers are negated."""
    changed = [p for name, p in decoder.named_parameters() if "layers" in name and p.dim() > 1]
    with torch.no_grad():
        for parameter in changed:
            parameter.neg_()
    yield
    with torch.no_grad():
        for parameter in changed:
            parameter.neg_()


@torch.no_grad()
def next_draw(decoder: Decoder, sample_id: int, tokens: tuple[int, ...]) -> tuple[int, float]:
    """The definition: a full forward pass over prompt and tokens under the weights of now."""
    ids = (*PROMPTS[sample_id], *tokens)
    none = torch.zeros(1, dtype=torch.int64)
    attention = PackedAttention(Segments(none, torch.tensor([len(ids)]), none, none))
    h_TD = decoder(torch.tensor(ids), torch.arange(len(ids)), attention)
    logits = F.linear(h_TD[-1:], decoder.lm_head_weight)
    uniform = uniforms(stream_keys(SEED, [sample_id]), torch.tensor([[len(tokens)]]))[0]
    draw = draw_tokens(logits, uniform, rule=DrawRule.of(SAMPLED))
    return int(draw.token_B), float(draw.logp_B)


def drain(engine: NativeRolloutEngine) -> list[Completion]:
    finished: list[Completion] = []
    while completions := engine.advance():
        finished += completions
    return finished


def assert_drawn_by(decoder: Decoder, completion: Completion, *, tokens: range) -> None:
    for index in tokens:
        token, log_prob = next_draw(decoder, completion.sample_id, completion.token_ids[:index])
        assert completion.token_ids[index] == token
        assert completion.log_probs[index] == pytest.approx(log_prob, abs=1e-5)


@pytest.mark.parametrize("max_prefill_tokens", [1, 20, 512])
def test_tokens_after_a_switch_are_those_of_the_new_weights(
    decoder: Decoder, max_prefill_tokens: int
) -> None:
    config = replace(CONFIG, max_num_batched_tokens=max_prefill_tokens)
    engine = NativeRolloutEngine(decoder, config)
    engine.add(REQUESTS)
    assert engine.advance(max_steps=4) == []
    with other_weights(decoder):
        assert engine.set_weights_version(1)
        finished = drain(engine)
    assert sorted(c.sample_id for c in finished) == [0, 1, 2, 3, 4]
    for completion in finished:
        (old, num_old), (new, num_new) = completion.version_runs
        assert (old, num_old, new) == (0, 5, 1)
        assert_drawn_by(decoder, completion, tokens=range(num_old))
        with other_weights(decoder):
            assert_drawn_by(decoder, completion, tokens=range(num_old, num_old + num_new))


def test_rows_that_wait_and_rows_that_have_ended_know_their_versions(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=2))
    engine.add(REQUESTS[:2])
    engine.advance(max_steps=3)
    engine.set_weights_version(1)
    engine.set_weights_version(2)
    engine.advance(max_steps=1)
    engine.set_weights_version(3)
    runs = {c.sample_id: c.version_runs for c in drain(engine)}
    assert runs == {0: ((0, 4), (2, 1), (3, 7)), 1: ((0, 4), (2, 1), (3, 7)), 2: ((3, 12),)}


def test_a_version_that_is_in_use_changes_nothing(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, CONFIG)
    engine.set_weights_version(5)
    engine.add(REQUESTS)
    engine.advance(max_steps=2)
    num_prefilled = engine.num_prefilled_tokens
    assert engine.set_weights_version(5)
    assert engine.num_prefilled_tokens == num_prefilled
    assert {c.version_runs for c in drain(engine)} == {((5, 7),), ((5, 12),)}


def test_a_bounded_advance_changes_no_token(decoder: Decoder) -> None:
    whole, bounded = NativeRolloutEngine(decoder, CONFIG), NativeRolloutEngine(decoder, CONFIG)
    whole.add(REQUESTS)
    bounded.add(REQUESTS)
    finished: list[Completion] = []
    num_calls = 0
    while len(finished) < 5:
        finished += bounded.advance(max_steps=3)
        num_calls += 1
    assert num_calls > 3
    assert finished == drain(whole)
