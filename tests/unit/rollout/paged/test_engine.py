# SPDX-License-Identifier: Apache-2.0
"""The paged engine, its kernels interpreted, against the dense engine of CPUs: the same tokens,
whatever is shared, preempted, batched or filtered.

An interpreted program takes milliseconds: rows are few, and filters have tests of their own.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.errors import UserError
from tandem.models.adapted import AdapterConfig
from tandem.models.decoder import Decoder
from tandem.models.quantized import QuantizedDecoder
from tandem.platforms.capture import eager
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.rollout.paged import step
from tandem.rollout.paged.cache import PAGE_TOKENS, RowTables
from tandem.rollout.paged.engine import LEAST_SHARED_BYTES, PagedRolloutEngine
from tandem.rollout.paged.kernels.attention import divide_pages
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams
from tests.fakes.draining import drain_by_sample
from tests.fakes.tiny_decoder import tiny_decoder

VOCABULARY = 40
EOS = (0, 1, 2, 3)
SEED = 11
SAMPLED = SamplingParams(temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=5)
PAGE_BYTES = 2 * 2 * PAGE_TOKENS * 16 * 4
CONFIG = NativeRolloutConfig(
    seed=SEED,
    eos_ids=EOS,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * PAGE_BYTES,
)
ADAPTED = AdapterConfig(2, 4.0, False, maps=(("layers.0.down", (0,)), ("layers.1.qkv", (0, 2))))


@pytest.fixture(scope="module")
def decoder(device: torch.device) -> Decoder:
    """Two layers, weights large enough for variety; a single key/value head, since the kernels have
    tests of their own with several."""
    decoder = tiny_decoder(
        vocab_size=VOCABULARY, num_heads=3, num_kv_heads=1, head_dim=16, tie_embeddings=False
    )
    return decoder.to(device)


def _request(
    first_id: int, *, n: int = 1, length: int = 6, sampling: SamplingParams = SAMPLED
) -> GenerationRequest:
    rng = random.Random(first_id)
    prompt = tuple(rng.randrange(4, VOCABULARY - 1) for _ in range(length))
    return GenerationRequest(tuple(range(first_id, first_id + n)), prompt, sampling)


def _generate(
    decoder: Decoder,
    requests: list[GenerationRequest],
    config: NativeRolloutConfig = CONFIG,
    *,
    num_multiprocessors: int = 1,
    least_shared_bytes: int = LEAST_SHARED_BYTES,
) -> dict[int, Completion]:
    engine = PagedRolloutEngine(
        decoder,
        config,
        make_capturer=eager,
        num_multiprocessors=num_multiprocessors,
        least_shared_bytes=least_shared_bytes,
    )
    engine.add(requests)
    return drain_by_sample(engine)


def _expected(decoder: Decoder, requests: list[GenerationRequest]) -> dict[int, Completion]:
    config = NativeRolloutConfig(
        seed=SEED,
        eos_ids=EOS,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        max_cache_bytes=1 << 30,
    )
    engine = NativeRolloutEngine(decoder, config)
    engine.add(requests)
    return drain_by_sample(engine)


def _assert_same(actual: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert actual.keys() == expected.keys()
    for sample_id, completion in expected.items():
        ours = actual[sample_id]
        assert ours.token_ids == completion.token_ids, sample_id
        assert ours.finish_reason == completion.finish_reason
        torch.testing.assert_close(
            torch.tensor(ours.log_probs), torch.tensor(completion.log_probs), rtol=0, atol=2e-5
        )


def test_tokens_are_those_of_the_dense_engine(decoder: Decoder) -> None:
    greedy = replace(SAMPLED, temperature=0.0, ignore_eos=True)
    requests = [_request(0, n=3), _request(10, n=2, sampling=greedy), _request(20, length=1)]
    engine = PagedRolloutEngine(decoder, CONFIG, make_capturer=eager, num_multiprocessors=1)
    engine.add(requests)
    assert engine.num_prefilled_tokens == 0
    finished = drain_by_sample(engine)
    _assert_same(finished, _expected(decoder, requests))
    assert {c.finish_reason for c in finished.values()} == {FinishReason.STOP, FinishReason.LENGTH}
    assert engine.num_decoded_tokens == sum(len(c.token_ids) for c in finished.values())
    assert engine.advance() == []


def test_filters_reach_the_rows_that_have_them(decoder: Decoder) -> None:
    filtered = replace(SAMPLED, temperature=3.0, top_k=3, max_new_tokens=2)
    nucleus = replace(filtered, top_k=-1, top_p=0.3)
    requests = [_request(0, sampling=filtered), _request(1, sampling=nucleus)]
    _assert_same(_generate(decoder, requests), _expected(decoder, requests))


def test_a_prompt_is_prefilled_once_for_all_its_samples(decoder: Decoder) -> None:
    engine = PagedRolloutEngine(decoder, CONFIG, make_capturer=eager, num_multiprocessors=1)
    single = replace(SAMPLED, max_new_tokens=1)
    requests = [_request(0, n=3, length=PAGE_TOKENS + 3, sampling=single)]
    engine.add(requests)
    _assert_same(drain_by_sample(engine), _expected(decoder, requests))
    assert engine.num_prefilled_tokens == PAGE_TOKENS + 3


def test_prompts_and_responses_across_page_borders(decoder: Decoder) -> None:
    sampling = replace(SAMPLED, ignore_eos=True, max_new_tokens=4)
    requests = [
        _request(0, n=2, length=PAGE_TOKENS - 2, sampling=sampling),
        _request(10, length=PAGE_TOKENS, sampling=sampling),
    ]
    actual = _generate(decoder, requests, num_multiprocessors=8)
    _assert_same(actual, _expected(decoder, requests))


@dataclass
class Tiled:
    """How many pages tiles read for the rows of each step, while ``divide_pages`` is replaced."""

    steps: list[list[int]] = field(default_factory=list[list[int]])

    def divide(self, rows: RowTables) -> None:
        divide_pages(rows)
        tiles, size = rows.tiles, len(rows.position_B)
        self.steps.append([] if tiles is None else tiles.num_pages_B[:size].tolist())


@pytest.fixture
def tiled(monkeypatch: pytest.MonkeyPatch) -> Tiled:
    found = Tiled()
    monkeypatch.setattr(step, "divide_pages", found.divide)
    return found


@pytest.mark.parametrize("is_worth_it", [True, False])
def test_pages_of_a_prompt_are_read_once_for_its_samples_where_that_is_worth_it(
    decoder: Decoder, tiled: Tiled, is_worth_it: bool
) -> None:
    """Three samples have two full pages in common, so that a layer reads four less."""
    sampling = replace(SAMPLED, max_new_tokens=12)
    requests = [
        _request(0, n=3, length=2 * PAGE_TOKENS + 3, sampling=sampling),
        _request(10, n=2, sampling=sampling),
    ]
    least = 4 * PAGE_BYTES // 2 + (0 if is_worth_it else 1)
    actual = _generate(decoder, requests, least_shared_bytes=least)
    _assert_same(actual, _expected(decoder, requests))
    assert ([2, 2, 2, 0] in tiled.steps) == is_worth_it
    assert [] in tiled.steps, "when fewer samples are left"


def test_samples_that_enter_later_share_pages_with_those_that_run(
    decoder: Decoder, tiled: Tiled
) -> None:
    """Of eight samples of two prompts, four run at a time, in the order in which others end."""
    sampling = replace(SAMPLED, max_new_tokens=30)
    requests = [_request(i, n=4, length=PAGE_TOKENS, sampling=sampling) for i in (0, 10)]
    actual = _generate(decoder, requests, least_shared_bytes=1)
    _assert_same(actual, _expected(decoder, requests))
    mixed = [steps for steps in tiled.steps if steps.count(1) == 4]
    assert len(mixed) > len([steps for steps in tiled.steps if 0 in steps])


def test_further_turns_share_the_pages_of_the_first_prompt(decoder: Decoder, tiled: Tiled) -> None:
    """The turns come back in another order. A long prompt before them has grown the cache."""
    long = _request(50, length=24 * PAGE_TOKENS, sampling=replace(SAMPLED, max_new_tokens=1))
    first = _request(0, n=3, length=2 * PAGE_TOKENS + 1)
    config = replace(CONFIG, max_num_seqs=3)
    sharing = PagedRolloutEngine(
        decoder, config, make_capturer=eager, num_multiprocessors=1, least_shared_bytes=1
    )
    histories: dict[int, tuple[int, ...]] = {}
    for engine in (NativeRolloutEngine(decoder, config), sharing):
        engine.add([long])
        assert len(drain_by_sample(engine)) == 1
        engine.add([replace(first, continues=True)])
        drawn = drain_by_sample(engine)
        found = {key: (*first.prompt_ids, *one.token_ids) for key, one in drawn.items()}
        assert found == (histories or found)
        histories = found
    further = [
        GenerationRequest(
            (key,),
            (*histories[key], 7 + key, 8),
            replace(SAMPLED, ignore_eos=True, max_new_tokens=10),
            first_index=len(histories[key]) + 2 - len(first.prompt_ids),
        )
        for key in (2, 0, 1)
    ]
    del tiled.steps[:]
    sharing.add(further)
    _assert_same(drain_by_sample(sharing), _expected(decoder, further))
    assert sharing.metrics()["num_kept_tokens"] > 3 * 2 * PAGE_TOKENS
    assert [2, 2, 2] in tiled.steps


@pytest.mark.parametrize("num_common", [0, 1])
def test_preempted_sequences_continue_with_the_same_tokens(
    decoder: Decoder, tiled: Tiled, num_common: int
) -> None:
    sampling = replace(SAMPLED, max_new_tokens=13, ignore_eos=True)
    length = (1 + num_common) * PAGE_TOKENS - 11
    requests = [_request(0, n=2, length=length, sampling=sampling)]
    config = replace(CONFIG, max_cache_bytes=(3 + num_common) * PAGE_BYTES)
    engine = PagedRolloutEngine(
        decoder, config, make_capturer=eager, num_multiprocessors=1, least_shared_bytes=1
    )
    engine.add(requests)
    completions = drain_by_sample(engine)
    assert engine.metrics()["num_preempted"] == 1
    _assert_same(completions, _expected(decoder, requests))
    assert ([1, 1] in tiled.steps) == bool(num_common)


def test_longer_requests_may_come_while_others_are_under_way(decoder: Decoder) -> None:
    first = [
        _request(0, sampling=replace(SAMPLED, max_new_tokens=1)),
        _request(1, sampling=replace(SAMPLED, max_new_tokens=11, ignore_eos=True)),
    ]
    longer = _request(2, length=2 * PAGE_TOKENS)
    engine = PagedRolloutEngine(decoder, CONFIG, make_capturer=eager, num_multiprocessors=1)
    engine.add(first)
    finished = {completion.sample_id: completion for completion in engine.advance()}
    assert set(finished) == {0}
    engine.set_weights_version(4)
    engine.add([longer])
    finished |= drain_by_sample(engine)
    _assert_same(finished, _expected(decoder, [*first, longer]))
    assert [finished[i].weights_version for i in range(3)] == [0, 0, 4]


def test_the_engine_reads_the_decoders_own_storage(decoder: Decoder) -> None:
    engine = PagedRolloutEngine(decoder, CONFIG, make_capturer=eager, num_multiprocessors=1)
    greedy = replace(SAMPLED, temperature=0.0, max_new_tokens=3, ignore_eos=True)
    engine.add([_request(0, sampling=greedy)])
    before = drain_by_sample(engine)[0]
    with torch.no_grad():
        decoder.final_norm.weight.neg_()
    expected = _expected(decoder, [_request(0, sampling=greedy)])
    engine.add([_request(0, sampling=greedy)])
    after = drain_by_sample(engine)
    with torch.no_grad():
        decoder.final_norm.weight.neg_()
    assert after[0].token_ids != before.token_ids
    _assert_same(after, expected)


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_a_sample_whose_logits_are_not_numbers_ends_and_the_others_go_on(decoder: Decoder) -> None:
    healthy = _request(0, sampling=replace(SAMPLED, max_new_tokens=3))
    poisoned = GenerationRequest((1,), (VOCABULARY - 1, 5), SAMPLED)
    expected = _expected(decoder, [healthy])
    saved = decoder.embedding.weight.detach().clone()
    with torch.no_grad():
        decoder.embedding.weight[VOCABULARY - 1] = float("nan")
    finished = _generate(decoder, [poisoned, healthy])
    with torch.no_grad():
        decoder.embedding.weight.copy_(saved)
    failed = finished.pop(1)
    assert len(failed.log_probs) == 1 and math.isnan(failed.log_probs[0])
    assert failed.finish_reason is FinishReason.FAILED
    _assert_same(finished, expected)


def test_what_can_never_be_held_is_refused(decoder: Decoder) -> None:
    config = replace(CONFIG, max_cache_bytes=PAGE_BYTES)
    engine = PagedRolloutEngine(decoder, config, make_capturer=eager, num_multiprocessors=1)
    with pytest.raises(UserError, match=f"holds {PAGE_TOKENS} tokens.*gpu_memory_utilization"):
        engine.add([_request(0, length=PAGE_TOKENS)])
    assert engine.advance() == []


@pytest.mark.parametrize("adapters", [None, ADAPTED], ids=["weights", "adapters"])
def test_fp8_is_that_of_the_dense_engine_also_after_new_weights(
    adapters: AdapterConfig | None, device: torch.device
) -> None:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "hidden_size": 16}
    decoder = tiny_decoder(vocab_size=VOCABULARY, adapters=adapters, **sizes).to(device)
    with torch.no_grad():
        decoder.embedding.weight.mul_(0.3)  # no two tokens are so likely that rounding decides
    requests = [_request(0, n=2)]
    paged = PagedRolloutEngine(
        decoder,
        CONFIG,
        make_capturer=eager,
        num_multiprocessors=1,
        quantized=QuantizedDecoder(decoder),
    )
    dense = NativeRolloutEngine(decoder, CONFIG, substitute=QuantizedDecoder(decoder))
    found: list[set[tuple[float, ...]]] = []
    for version in (0, 1):
        for engine in (paged, dense):
            engine.set_weights_version(version)
            engine.add(requests)
        ours, theirs = drain_by_sample(paged), drain_by_sample(dense)
        found.append({tuple(one.log_probs) for one in ours.values()})
        exact = _expected(decoder, requests)
        for sample_id, completion in theirs.items():
            assert ours[sample_id].token_ids == completion.token_ids
            log_probs = torch.tensor(completion.log_probs)
            # A number of fp8 between two steps may be rounded to either, here and there.
            assert (torch.tensor(ours[sample_id].log_probs) - log_probs).abs().max() < 0.03
            if exact[sample_id].token_ids == completion.token_ids:
                assert not torch.equal(log_probs, torch.tensor(exact[sample_id].log_probs))
        with torch.no_grad():
            kind = "weight" if adapters is None else "lora_b"
            decoder.get_parameter(f"layers.0.down.{kind}").mul_(-1.0)
    assert found[0].isdisjoint(found[1]), "the change has an effect"
    assert paged.sleep() and dense.sleep()
    paged.add(requests)
    assert drain_by_sample(paged).keys() == {0, 1}
