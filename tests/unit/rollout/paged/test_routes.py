# SPDX-License-Identifier: Apache-2.0
"""MO7 and MO23 in the paged engine: it records the experts that the dense engine records.

Whatever is shared, preempted, parked, captured or computed again, a token keeps the experts of the
pass that first fed it to its sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.config.derived.experts import ExpertConfig
from tandem.models.attention import PackedAttention
from tandem.models.decoder import Decoder
from tandem.models.routing import RecordedRoutes
from tandem.platforms.capture import Capturer, eager
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.paged.engine import WINDOW_TOKENS, PagedRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams, Segments
from tests.fakes.draining import drain, drain_by_sample
from tests.fakes.tiny_decoder import tiny_decoder
from tests.unit.rollout.definition import drain_under_versions, weights_of

VOCABULARY, PAGE = 40, 16  # compiled kernels take pages of 16 tokens and more
EXPERTS = ExpertConfig(8, 3, 16, dense_layers=(0,), is_renormalized=True)
SAMPLED = SamplingParams(1.0, 1.0, -1, max_new_tokens=WINDOW_TOKENS + 5)
PAGE_BYTES = 3 * 2 * PAGE * 16 * 4
CONFIG = NativeRolloutConfig(
    seed=11,
    eos_ids=(0, 1, 2),
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * PAGE_BYTES,
    records_routes=True,
)


@pytest.fixture(scope="module")
def decoder(device: torch.device) -> Decoder:
    """Three layers, of which the first is dense."""
    decoder = tiny_decoder(
        vocab_size=VOCABULARY,
        num_layers=3,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        tie_embeddings=False,
        experts=EXPERTS,
    )
    return decoder.to(device)


def warm() -> Capturer:
    """Return a capturer that runs the step once before it is used, as that of graphs does."""

    def capture(function: Callable[[], None]) -> Callable[[], None]:
        function()
        return function

    return capture


def paged(
    decoder: Decoder,
    config: NativeRolloutConfig = CONFIG,
    *,
    make_capturer: Callable[[], Capturer] = eager,
) -> PagedRolloutEngine:
    return PagedRolloutEngine(
        decoder, config, make_capturer=make_capturer, num_multiprocessors=1, page_tokens=PAGE
    )


def request(
    first_id: int, *, n: int = 1, length: int, sampling: SamplingParams = SAMPLED
) -> GenerationRequest:
    prompt = tuple((7 * first_id + i) % VOCABULARY for i in range(length))
    return GenerationRequest(tuple(range(first_id, first_id + n)), prompt, sampling)


def dense(decoder: Decoder, requests: list[GenerationRequest]) -> dict[int, Completion]:
    engine = NativeRolloutEngine(decoder, replace(CONFIG, max_num_seqs=64, max_cache_bytes=1 << 30))
    engine.add(requests)
    return drain_by_sample(engine)


def assert_same(actual: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert actual.keys() == expected.keys()
    for sample_id, completion in expected.items():
        ours = actual[sample_id]
        assert ours.token_ids == completion.token_ids, sample_id
        assert ours.routes.dtype == completion.routes.dtype == np.uint8
        assert np.array_equal(ours.routes, completion.routes), sample_id


@pytest.mark.parametrize("make_capturer", [eager, warm])
def test_mo7_routes_are_those_of_the_dense_engine(
    make_capturer: Callable[[], Capturer], decoder: Decoder
) -> None:
    """Samples of a prompt enter together or later, and end at an end token or at their limit."""
    requests = [
        request(0, n=2, length=PAGE + 3),
        request(10, n=3, length=5, sampling=replace(SAMPLED, max_new_tokens=3)),
        request(20, length=1, sampling=replace(SAMPLED, max_new_tokens=4, ignore_eos=True)),
        request(30, n=2, length=2 * PAGE, sampling=replace(SAMPLED, max_new_tokens=1)),
    ]
    engine = paged(decoder, make_capturer=make_capturer)
    engine.add(requests)
    found = drain_by_sample(engine)
    assert_same(found, dense(decoder, requests))
    for one in requests:
        for sample_id in one.sample_ids:
            num_fed = len(one.prompt_ids) + len(found[sample_id].token_ids) - 1
            assert found[sample_id].routes.shape == (num_fed, 2, 3)


def test_mo7_preempted_rows_and_grown_caches_have_the_same_routes(decoder: Decoder) -> None:
    longer = replace(SAMPLED, max_new_tokens=2 * WINDOW_TOKENS, ignore_eos=True)
    requests = [request(0, n=2, length=PAGE + 3, sampling=longer)]
    engine = paged(decoder, replace(CONFIG, max_cache_bytes=4 * PAGE_BYTES))
    engine.add(requests)
    assert_same(drain_by_sample(engine), dense(decoder, requests))
    assert engine.metrics()["num_preempted"] > 0
    growing = paged(decoder)
    growing.add(requests)
    assert growing.advance(max_steps=WINDOW_TOKENS) == []
    later = [request(20, n=2, length=4 * PAGE, sampling=replace(longer, max_new_tokens=2))]
    growing.add(later)
    assert_same(drain_by_sample(growing), dense(decoder, [*requests, *later]))
    again = PAGE + 3 + 2 * WINDOW_TOKENS  # the prompt, and what the rows had drawn
    assert growing.num_prefilled_tokens == PAGE + 3 + 4 * PAGE + again


@pytest.mark.parametrize("keeps_pages", [True, False])
def test_mo7_a_further_turn_has_the_routes_of_all_its_tokens(
    keeps_pages: bool, decoder: Decoder
) -> None:
    """Pages wait for the next turn, or are given up in between."""
    engines = (paged(decoder), NativeRolloutEngine(decoder, CONFIG))
    # The memory of the longest turn is there from the first one on: it gives up pages if it grows.
    longest = request(9, n=2, length=5 * PAGE, sampling=replace(SAMPLED, max_new_tokens=1))
    engines[0].add([longest])
    drain(engines[0])
    ids = request(3, length=PAGE + 2).prompt_ids
    for turn in range(3):
        sampling = replace(SAMPLED, max_new_tokens=4)
        first = len(ids) - (PAGE + 2)
        further = GenerationRequest((3,), ids, sampling, first_index=first, continues=turn < 2)
        found: list[dict[int, Completion]] = []
        for engine in engines:
            engine.add([further])
            found.append(drain_by_sample(engine))
        assert_same(*found)
        assert len(found[0][3].routes) == len(ids) + len(found[0][3].token_ids) - 1
        if not keeps_pages:
            engines[0].forget((3,))
        ids = (*ids, *found[0][3].token_ids, 7, 8)
    assert (engines[0].metrics()["num_kept_tokens"] > 0) == keeps_pages


def defined(decoder: Decoder, prompt: tuple[int, ...], completion: Completion) -> np.ndarray:
    """Return the routes of full passes under the version that drew each token."""
    fed = (*prompt, *completion.token_ids[:-1])
    parts: list[np.ndarray] = []
    begin, end = 0, len(prompt) - 1
    for version, count in completion.version_runs:
        end += count
        length = torch.tensor([end])
        none = torch.zeros(1, dtype=torch.int64)
        device = decoder.lm_head_weight.device
        attention = PackedAttention(Segments(none, length, none, none), device)
        recorder = RecordedRoutes(EXPERTS)
        with weights_of(decoder, version), torch.no_grad():
            ids = torch.tensor(fed[:end], device=device)
            decoder(ids, torch.arange(end, device=device), attention, routing=recorder)
        parts.append(recorder.routes()[begin:].cpu().numpy())
        begin = end
    return np.concatenate(parts)


def test_mo23_computed_again_a_token_keeps_the_experts_under_which_the_next_was_drawn(
    decoder: Decoder,
) -> None:
    """Three rows for six samples, a change every window: samples of a group end, run and wait."""
    requests = [request(0, n=4, length=PAGE + 3), request(5, n=2, length=9)]
    engine = paged(decoder, replace(CONFIG, max_num_seqs=3))
    engine.add(requests)
    finished = drain_under_versions(engine, decoder, count=6, max_steps=WINDOW_TOKENS)
    assert max(len(completion.version_runs) for completion in finished) > 1
    prompts = {i: one.prompt_ids for one in requests for i in one.sample_ids}
    for one in finished:
        expected = defined(decoder, prompts[one.sample_id], one)
        assert np.array_equal(one.routes, expected), one.sample_id


def test_mo23_kept_pages_have_the_routes_of_the_dense_engine(decoder: Decoder) -> None:
    """The weights change in the middle of responses, and both engines keep what they cached."""
    longer = replace(SAMPLED, max_new_tokens=WINDOW_TOKENS + 4, ignore_eos=True)
    requests = [
        request(0, n=2, length=PAGE - 3, sampling=longer),
        request(5, length=4, sampling=longer),
    ]
    config = replace(CONFIG, keeps_cache=True)
    ours, expected = (
        _switched(engine, requests, decoder)
        for engine in (paged(decoder, config), NativeRolloutEngine(decoder, config))
    )
    assert {len(one.version_runs) for one in ours.values()} == {2}
    assert_same(ours, expected)


def _switched(
    engine: PagedRolloutEngine | NativeRolloutEngine,
    requests: list[GenerationRequest],
    decoder: Decoder,
) -> dict[int, Completion]:
    """Draw as many tokens of each row under version 0 as a window has, and the rest under 1."""
    engine.add(requests)
    # The dense engine draws one token when rows enter, and one in each step.
    finished = engine.advance(max_steps=WINDOW_TOKENS)
    engine.settle()
    with weights_of(decoder, 1):
        engine.set_weights_version(1)
        finished += drain(engine)
    return {one.sample_id: one for one in finished}
