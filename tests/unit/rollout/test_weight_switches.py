# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the native engine generates: tokens are kept, the rest is drawn under
the new weights, and every token says which version drew it.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tandem.models.decoder import Decoder
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.types import Completion, FinishReason, GenerationRequest, SamplingParams
from tests.fakes.draining import drain
from tests.fakes.tiny_decoder import tiny_decoder
from tests.unit.rollout.definition import assert_drawn, weights_of

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


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Two layers, four heads over two key/value heads, weights large enough for variety."""
    return tiny_decoder()


@pytest.mark.parametrize("max_prefill_tokens", [1, 20, 512])
def test_tokens_after_a_switch_are_those_of_the_new_weights(
    decoder: Decoder, max_prefill_tokens: int
) -> None:
    config = replace(CONFIG, max_num_batched_tokens=max_prefill_tokens)
    engine = NativeRolloutEngine(decoder, config)
    engine.add(REQUESTS)
    assert engine.advance(max_steps=4) == []
    with weights_of(decoder, 1):
        assert engine.set_weights_version(1)
        finished = drain(engine)
    assert {completion.version_runs[0] for completion in finished} == {(0, 5)}
    assert_drawn(decoder, REQUESTS, finished, seed=SEED)


@pytest.mark.parametrize("max_prefill_tokens", [9, 512])
def test_samples_of_a_group_that_end_run_and_wait_while_weights_change(
    decoder: Decoder, max_prefill_tokens: int
) -> None:
    """Three rows for nine samples, a change every other step, many tokens that end a response."""
    ending = replace(SAMPLED, ignore_eos=False)
    requests = [
        GenerationRequest(tuple(range(5)), (5, 6, 7, 8, 9, 10), ending),
        GenerationRequest((5, 6), (9,), ending),
        GenerationRequest((7, 8), (30, 12), replace(ending, temperature=0.0)),
    ]
    config = replace(
        CONFIG,
        eos_ids=(0, 1, 2, 3),
        max_num_seqs=3,
        max_num_batched_tokens=max_prefill_tokens,
    )
    engine = NativeRolloutEngine(decoder, config)
    engine.add(requests)
    finished: list[Completion] = []
    for version in itertools.count():
        with weights_of(decoder, version):
            engine.set_weights_version(version)
            finished += engine.advance(max_steps=2)
        if len(finished) == 9:
            break
    assert_drawn(decoder, requests, finished, seed=SEED)
    assert {c.finish_reason for c in finished} == {FinishReason.STOP, FinishReason.LENGTH}
    assert max(len(completion.version_runs) for completion in finished) > 3


@pytest.mark.parametrize("num_switches", [1, 3])
def test_each_prompt_is_prefilled_again_once_and_samples_behind_it(
    decoder: Decoder, num_switches: int
) -> None:
    engine = NativeRolloutEngine(decoder, CONFIG)
    engine.add(REQUESTS)
    engine.advance(max_steps=4)
    before = engine.num_prefilled_tokens
    for version in range(1, 1 + num_switches):
        engine.set_weights_version(version)
    engine.advance(max_steps=1)
    # Of five tokens each the newest is fed to the next step.
    assert engine.num_prefilled_tokens - before == (3 + 1 + 5) + 5 * 4


def test_what_waits_of_a_group_enters_behind_the_prompt_that_was_prefilled_again(
    decoder: Decoder,
) -> None:
    (request,) = REQUESTS[2:]
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=1))
    engine.add([request])
    engine.advance(max_steps=3)
    with weights_of(decoder, 1):
        engine.set_weights_version(1)
        finished = drain(engine)
    assert engine.num_prefilled_tokens == 5 + (5 + 3)
    assert [c.version_runs for c in finished] == [((0, 4), (1, 3)), ((1, 7),)]
    assert_drawn(decoder, [request], finished, seed=SEED)


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
    assert {c.version_runs for c in drain(engine)} == {((5, 7),), ((5, 12),)}
    assert engine.num_prefilled_tokens == num_prefilled


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


def test_what_is_cached_can_be_kept(decoder: Decoder) -> None:
    engine = NativeRolloutEngine(decoder, replace(CONFIG, keeps_cache=True))
    engine.add(REQUESTS)
    for version, steps in ((0, 3), (1, 2), (2, None)):
        with weights_of(decoder, version):
            engine.set_weights_version(version)
            finished = drain(engine) if steps is None else engine.advance(steps)
    assert engine.num_prefilled_tokens == sum(len(request.prompt_ids) for request in REQUESTS)
    assert {len(completion.version_runs) for completion in finished} == {3}
    assert_drawn(decoder, REQUESTS, finished, seed=SEED, keeps_cache=True)
    with pytest.raises(AssertionError):
        assert_drawn(decoder, REQUESTS, finished, seed=SEED)


def test_samples_that_wait_draw_from_new_weights_where_the_cache_is_kept(decoder: Decoder) -> None:
    """Two rows for four samples; the later two enter when the first two have ended."""
    config = replace(CONFIG, max_num_seqs=2, keeps_cache=True)
    engine = NativeRolloutEngine(decoder, config)
    requests = [GenerationRequest((0, 1, 2, 3), (5, 6, 7), SAMPLED)]
    engine.add(requests)
    assert engine.advance(max_steps=5) == []
    with weights_of(decoder, 1):
        engine.set_weights_version(1)
        finished = drain(engine)
    assert [c.version_runs for c in finished if c.sample_id > 1] == [((1, 12),)] * 2
    assert_drawn(decoder, requests, finished, seed=SEED, keeps_cache=True)
