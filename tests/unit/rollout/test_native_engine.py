# SPDX-License-Identifier: Apache-2.0
"""The native engine against one-by-one generation with full forward passes, under every kind of
batching.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.models.logprob import token_log_probs
from tandem.rollout.keyed_random import stream_keys, uniforms
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.rollout.sampler import DrawRule, draw_tokens
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams, Segments
from tests.fakes.draining import drain_by_sample
from tests.fakes.tiny_decoder import tiny_decoder

VOCABULARY = 40
EOS = (0, 1)
SEED = 11
SAMPLED = SamplingParams(temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=12)
CONFIG = NativeRolloutConfig(
    seed=SEED,
    eos_ids=EOS,
    max_num_seqs=64,
    max_num_batched_tokens=512,
    max_cache_bytes=1 << 30,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Two layers, four heads over two key/value heads, weights large enough for variety."""
    return tiny_decoder(vocab_size=VOCABULARY)


def _requests(
    count: int, *, n: int = 3, sampling: SamplingParams = SAMPLED
) -> list[GenerationRequest]:
    rng = random.Random(5)
    return [
        GenerationRequest(
            tuple(range(n * i, n * i + n)),
            tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(1, 14))),
            sampling,
        )
        for i in range(count)
    ]


def _generate(
    decoder: Decoder, requests: list[GenerationRequest], config: NativeRolloutConfig = CONFIG
) -> dict[int, Completion]:
    engine = NativeRolloutEngine(decoder, config)
    engine.add(requests)
    return drain_by_sample(engine)


def _single(length: int) -> PackedAttention:
    none = torch.zeros(1, dtype=torch.int64)
    return PackedAttention(Segments(none, torch.tensor([length]), none, none))


def _hidden(decoder: Decoder, token_ids: tuple[int, ...]) -> torch.Tensor:
    positions = torch.arange(len(token_ids))
    return decoder(torch.tensor(token_ids), positions, _single(len(token_ids)))


@torch.no_grad()
def _one_by_one(decoder: Decoder, request: GenerationRequest, sample_id: int) -> Completion:
    """The definition: a full forward pass a token, nothing cached, nothing batched."""
    ids, logps = request.prompt_ids, []
    key = stream_keys(SEED, [sample_id])
    for position in range(request.sampling.max_new_tokens):
        logits = F.linear(_hidden(decoder, ids)[-1:], decoder.lm_head_weight)
        uniform = uniforms(key, torch.tensor([[position]]))[0]
        draw = draw_tokens(logits, uniform, rule=DrawRule.of(request.sampling))
        ids, logps = (*ids, int(draw.token_B)), [*logps, float(draw.logp_B)]
        if ids[-1] in EOS and not request.sampling.ignore_eos:
            break
    stopped = ids[-1] in EOS and not request.sampling.ignore_eos
    reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    drawn = array("i", ids[len(request.prompt_ids) :])
    return Completion(sample_id, drawn, array("f", logps), reason, 0)


def _assert_same(actual: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert actual.keys() == expected.keys()
    for sample_id, completion in expected.items():
        other = actual[sample_id]
        assert other.token_ids == completion.token_ids
        assert other.finish_reason == completion.finish_reason
        assert other.log_probs == pytest.approx(completion.log_probs, abs=1e-5)


@pytest.fixture(scope="module")
def expected(decoder: Decoder) -> dict[int, Completion]:
    """Ten requests of three samples, generated one by one."""
    return {
        sample_id: _one_by_one(decoder, request, sample_id)
        for request in _requests(10)
        for sample_id in request.sample_ids
    }


def test_the_fixture_exercises_both_ways_to_finish(expected: dict[int, Completion]) -> None:
    reasons = [completion.finish_reason for completion in expected.values()]
    assert reasons.count(FinishReason.STOP) > 5 and reasons.count(FinishReason.LENGTH) > 5


@pytest.mark.parametrize("max_num_seqs", [1, 2, 7, 64])
def test_continuous_batching_equals_one_by_one(
    decoder: Decoder, expected: dict[int, Completion], max_num_seqs: int
) -> None:
    config = replace(CONFIG, max_num_seqs=max_num_seqs, max_num_batched_tokens=20)
    _assert_same(_generate(decoder, _requests(10), config), expected)


def test_a_small_cache_only_delays(decoder: Decoder, expected: dict[int, Completion]) -> None:
    token_bytes = 2 * 2 * 2 * 8 * 4
    config = replace(CONFIG, max_cache_bytes=60 * token_bytes)
    _assert_same(_generate(decoder, _requests(10), config), expected)


def test_order_and_arrival_do_not_matter(decoder: Decoder, expected: dict[int, Completion]) -> None:
    requests = _requests(10)
    random.Random(1).shuffle(requests)
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=9))
    finished: dict[int, Completion] = {}
    while requests or len(finished) < 30:
        engine.add([requests.pop() for _ in range(min(len(requests), 2))])
        finished.update({c.sample_id: c for c in engine.advance()})
    _assert_same(finished, expected)


def test_other_sampling_rules_in_the_batch_do_not_matter(
    decoder: Decoder, expected: dict[int, Completion]
) -> None:
    greedy = replace(SAMPLED, temperature=0.0, max_new_tokens=5)
    nucleus = replace(SAMPLED, top_p=0.8, top_k=10, ignore_eos=True)
    others = [
        GenerationRequest((1000 + i,), (3, 4, 5 + i), (greedy, nucleus)[i % 2]) for i in range(6)
    ]
    requests = [x for pair in zip(_requests(10), others * 2, strict=False) for x in pair][:16]
    finished = _generate(decoder, requests + _requests(10)[8:], replace(CONFIG, max_num_seqs=13))
    for request in others:
        expected = expected | {
            sample_id: _one_by_one(decoder, request, sample_id) for sample_id in request.sample_ids
        }
    _assert_same(finished, expected)


def test_long_responses_shift_and_grow_the_cache(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tandem.rollout.native.engine._SMALL_CACHE_BYTES", 0)
    endless = replace(SAMPLED, ignore_eos=True, max_new_tokens=150)
    brief = replace(endless, max_new_tokens=90)
    requests = [
        GenerationRequest((0,), (2, 3), endless),
        GenerationRequest((1, 2), (4,) * 9, brief),
    ]
    requests += [GenerationRequest((10 + i,), (5 + i,) * 20, brief) for i in range(3)]
    finished = _generate(decoder, requests, replace(CONFIG, max_num_seqs=3))
    _assert_same(finished, {i: _one_by_one(decoder, r, i) for r in requests for i in r.sample_ids})


def test_a_prompt_is_prefilled_once_for_all_its_samples(decoder: Decoder) -> None:
    requests = _requests(6, n=8)
    prompt_tokens = sum(len(request.prompt_ids) for request in requests)
    for max_num_seqs in (1, 5, 64):
        engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=max_num_seqs))
        engine.add(requests)
        drain_by_sample(engine)
        assert engine.num_prefilled_tokens == prompt_tokens


def test_no_step_is_spent_on_finished_sequences(
    decoder: Decoder, expected: dict[int, Completion]
) -> None:
    engine = NativeRolloutEngine(decoder, CONFIG)
    engine.add(_requests(10))
    drain_by_sample(engine)
    tokens = sum(len(completion.token_ids) for completion in expected.values())
    assert engine.num_decoded_tokens == tokens - len(expected)


def test_one_new_token_needs_no_decode_step(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, CONFIG)
    engine.add(_requests(4, sampling=replace(SAMPLED, max_new_tokens=1)))
    finished = drain_by_sample(engine)
    assert {len(completion.token_ids) for completion in finished.values()} == {1}
    assert engine.num_decoded_tokens == 0


def test_samples_of_a_prompt_differ_and_seeds_differ(decoder: Decoder) -> None:
    requests = _requests(4, n=4, sampling=replace(SAMPLED, ignore_eos=True))
    first = _generate(decoder, requests)
    other = _generate(decoder, requests, replace(CONFIG, seed=SEED + 1))
    assert len({tuple(completion.token_ids) for completion in first.values()}) == 16
    assert all(first[i].token_ids != other[i].token_ids for i in first)


def test_log_probs_equal_the_trainers(decoder: Decoder) -> None:
    requests = _requests(20, sampling=replace(SAMPLED, max_new_tokens=40))
    finished = _generate(decoder, requests)
    differences: list[torch.Tensor] = []
    for request in requests:
        for completion in (finished[sample_id] for sample_id in request.sample_ids):
            ids = (*request.prompt_ids, *completion.token_ids)
            with torch.no_grad():
                h_TD = _hidden(decoder, ids)[len(request.prompt_ids) - 1 : -1]
                trained = token_log_probs(
                    h_TD,
                    decoder.lm_head_weight,
                    target_R=torch.tensor(completion.token_ids),
                    temperature=SAMPLED.temperature,
                    with_entropy=False,
                )
            differences.append((trained.logp_R - torch.tensor(completion.log_probs)).abs())
    assert float(torch.cat(differences).mean()) <= 1e-6
    assert float(torch.cat(differences).max()) <= 1e-4


def test_the_engine_reads_the_decoders_own_storage(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, CONFIG)
    greedy = replace(SAMPLED, temperature=0.0, max_new_tokens=3, ignore_eos=True)
    engine.add([GenerationRequest((0,), (2, 3, 4), greedy)])
    before = drain_by_sample(engine)[0].token_ids
    saved = decoder.final_norm.weight.detach().clone()
    with torch.no_grad():
        decoder.final_norm.weight.neg_()
    engine.set_weights_version(7)
    engine.add([GenerationRequest((1,), (2, 3, 4), greedy)])
    after = drain_by_sample(engine)[1]
    with torch.no_grad():
        decoder.final_norm.weight.copy_(saved)
    assert after.token_ids != before
    assert after.weights_version == 7


def test_sequences_keep_the_version_they_began_with(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=2))
    engine.add(_requests(2, n=3, sampling=replace(SAMPLED, ignore_eos=True)))
    first = {completion.sample_id: completion.weights_version for completion in engine.advance()}
    engine.set_weights_version(1)
    later = {sample_id: c.weights_version for sample_id, c in drain_by_sample(engine).items()}
    assert first == {0: 0, 1: 0}
    assert set(later.values()) == {1}


def test_a_large_cache_is_given_back_when_idle(
    decoder: Decoder, expected: dict[int, Completion], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kept_bytes, rows_kept in ((1 << 26, 30), (0, 0)):
        monkeypatch.setattr("tandem.rollout.native.engine._SMALL_CACHE_BYTES", kept_bytes)
        engine = NativeRolloutEngine(decoder, CONFIG)
        for _ in range(2):
            engine.add(_requests(10))
            _assert_same(drain_by_sample(engine), expected)
            assert len(engine._cache.tokens_RC) == rows_kept
        assert engine.advance() == []
