# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the paged engine generates: tokens are kept, the rest is drawn under
the new weights, whatever is shared, waits or is preempted.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder
from tandem.platforms.capture import eager
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import WINDOW_TOKENS, PagedRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams
from tests.fakes.draining import drain
from tests.fakes.tiny_decoder import tiny_decoder
from tests.unit.rollout.definition import assert_drawn, drain_under_versions, weights_of

SEED = 11
VOCABULARY = 2 + PAGE_TOKENS
SAMPLED = SamplingParams(
    temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=WINDOW_TOKENS + 5, ignore_eos=True
)
PAGE_BYTES = 2 * 2 * PAGE_TOKENS * 16 * 4
CONFIG = NativeRolloutConfig(
    seed=SEED,
    eos_ids=(0, 1),
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * PAGE_BYTES,
)


@pytest.fixture(scope="module")
def decoder(device: torch.device) -> Decoder:
    """Two layers, two heads that share keys and values: few programs, each takes milliseconds."""
    decoder = tiny_decoder(
        vocab_size=VOCABULARY, num_heads=2, num_kv_heads=1, head_dim=16, tie_embeddings=False
    )
    return decoder.to(device)


def request(
    first_id: int, *, n: int = 1, length: int, sampling: SamplingParams = SAMPLED
) -> GenerationRequest:
    prompt = tuple((first_id + i) % VOCABULARY for i in range(length))
    return GenerationRequest(tuple(range(first_id, first_id + n)), prompt, sampling)


def paged(decoder: Decoder, config: NativeRolloutConfig = CONFIG) -> PagedRolloutEngine:
    return PagedRolloutEngine(decoder, config, make_capturer=eager, num_multiprocessors=1)


def test_each_prompt_is_prefilled_again_once_and_samples_behind_it(decoder: Decoder) -> None:
    """However often the weights have changed before the next step."""
    requests = [request(0, n=2, length=PAGE_TOKENS + 5), request(2, length=1)]
    engine = paged(decoder)
    engine.add(requests)
    assert engine.advance(max_steps=WINDOW_TOKENS) == []
    before = engine.num_prefilled_tokens
    assert engine.set_weights_version(1) and engine.set_weights_version(2)
    with weights_of(decoder, 2):
        finished = drain(engine)
    (num_old,) = {completion.version_runs[0][1] for completion in finished}
    assert num_old == WINDOW_TOKENS + 1
    # The newest token of each is fed to the next step.
    again = (PAGE_TOKENS + 5) + 1 + 3 * (num_old - 1)
    assert engine.num_prefilled_tokens - before == again
    assert engine.metrics()["num_preempted"] == 0
    assert {c.version_runs[1][0] for c in finished} == {2}
    assert_drawn(decoder, requests, finished, seed=SEED)


@pytest.mark.parametrize(
    ("length", "max_prefill_tokens"),
    [(5, 512), (PAGE_TOKENS, 512), (PAGE_TOKENS + 3, 12)],
)
def test_samples_of_a_group_that_end_run_and_wait_while_weights_change(
    decoder: Decoder, length: int, max_prefill_tokens: int
) -> None:
    """Three rows for six samples, a change every window, many tokens that end a response."""
    ending = replace(SAMPLED, ignore_eos=False)
    requests = [
        request(0, n=4, length=length, sampling=ending),
        request(5, n=2, length=9, sampling=replace(ending, temperature=0.0)),
    ]
    config = replace(
        CONFIG,
        eos_ids=(0, 1, 2),
        max_num_seqs=3,
        max_num_batched_tokens=max_prefill_tokens,
    )
    engine = paged(decoder, config)
    engine.add(requests)
    finished = drain_under_versions(engine, decoder, count=6, max_steps=WINDOW_TOKENS)
    assert_drawn(decoder, requests, finished, seed=SEED)
    assert {c.finish_reason for c in finished} == {FinishReason.STOP, FinishReason.LENGTH}
    assert max(len(completion.version_runs) for completion in finished) > 1


def test_what_is_preempted_after_a_switch_comes_back_behind_its_prompt(decoder: Decoder) -> None:
    """Both samples need another page where there is one: the newer leaves before its keys are
    computed again, and comes back when a third sample has ended, while the older goes on."""
    length = 2 * PAGE_TOKENS - 11
    requests = [
        request(2, length=70, sampling=replace(SAMPLED, max_new_tokens=WINDOW_TOKENS + 2)),
        request(
            0, n=2, length=length, sampling=replace(SAMPLED, max_new_tokens=2 * WINDOW_TOKENS + 3)
        ),
    ]
    engine = paged(decoder, replace(CONFIG, max_cache_bytes=6 * PAGE_BYTES))
    engine.add(requests)
    engine.advance(max_steps=WINDOW_TOKENS)
    with weights_of(decoder, 1):
        engine.set_weights_version(1)
        engine.advance(max_steps=WINDOW_TOKENS)
        engine.settle()
        finished = drain(engine)
    assert engine.metrics()["num_preempted"] == 1
    again, own = 70 + length + 2 * WINDOW_TOKENS, WINDOW_TOKENS + 1
    assert engine.num_prefilled_tokens == 70 + length + again + own
    assert_drawn(decoder, requests, finished, seed=SEED)
    assert engine.sleep()


def test_greedy_tokens_after_a_switch_are_those_of_a_fresh_engine(decoder: Decoder) -> None:
    greedy = replace(SAMPLED, temperature=0.0)
    (old,) = requests = [request(0, n=2, length=PAGE_TOKENS + 3, sampling=greedy)]
    engine = paged(decoder)
    engine.add(requests)
    engine.advance(max_steps=WINDOW_TOKENS)
    engine.set_weights_version(1)
    with weights_of(decoder, 1):
        first, second = drain(engine)
        (_, num_old), (_, num_new) = first.version_runs
        prefix = (*old.prompt_ids, *first.token_ids[:num_old])
        fresh = paged(decoder)
        fresh.add([GenerationRequest((0,), prefix, replace(greedy, max_new_tokens=num_new))])
        (expected,) = drain(fresh)
    assert first.token_ids[num_old:] == second.token_ids[num_old:] == expected.token_ids


def test_what_ends_while_the_engine_settles_is_not_lost(decoder: Decoder) -> None:
    engine = paged(decoder)
    short = SamplingParams(1.0, 1.0, -1, max_new_tokens=3, ignore_eos=True)
    engine.add([GenerationRequest((0,), (5, 6), short), request(2, length=1)])
    assert engine.advance(max_steps=1) == []
    engine.set_weights_version(1)
    finished = {completion.sample_id: completion for completion in drain(engine)}
    assert finished[0].version_runs == ((0, 3),)
    assert [version for version, _ in finished[2].version_runs] == [0, 1]


def test_what_is_cached_can_be_kept(decoder: Decoder) -> None:
    """Also where a window ends within a page, and the weights change more than once."""
    longer = replace(SAMPLED, max_new_tokens=3 * WINDOW_TOKENS)
    requests = [
        request(0, n=2, length=PAGE_TOKENS - 5, sampling=longer),
        request(2, length=9, sampling=longer),
    ]
    engine = paged(decoder, replace(CONFIG, keeps_cache=True))
    engine.add(requests)
    finished: list[Completion] = []
    for version in range(3):
        with weights_of(decoder, version):
            engine.set_weights_version(version)
            finished += engine.advance(max_steps=WINDOW_TOKENS)
            engine.settle()
    with weights_of(decoder, 2):
        finished += drain(engine)
    assert engine.num_prefilled_tokens == PAGE_TOKENS - 5 + 9
    assert {len(completion.version_runs) for completion in finished} == {3}
    assert_drawn(decoder, requests, finished, seed=SEED, keeps_cache=True)
    with pytest.raises(AssertionError):
        assert_drawn(decoder, requests, finished, seed=SEED)
