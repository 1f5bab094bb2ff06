# SPDX-License-Identifier: Apache-2.0
"""The paged engine, its kernels interpreted, against the dense engine of CPUs: the same tokens,
whatever is shared, preempted, batched or filtered.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder, DecoderConfig
from tandem.models.rotary import RopeConfig
from tandem.platforms.capture import eager
from tandem.rollout.native.engine import NativeRolloutConfig, NativeRolloutEngine
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import PagedRolloutConfig, PagedRolloutEngine
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes import interpreted_triton

interpreted_triton.install()
VOCABULARY = 40
EOS = (0, 1)
SEED = 11
SAMPLED = SamplingParams(temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=5)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE_BYTES = 2 * 2 * 2 * PAGE_TOKENS * 16 * 4
CONFIG = PagedRolloutConfig(
    seed=SEED,
    eos_ids=EOS,
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * PAGE_BYTES,
    busy_programs=2,
)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """Two layers, six heads over two key/value heads, weights large enough for variety."""
    config = DecoderConfig(
        family="qwen2",
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=RopeConfig(10_000.0),
        max_position_embeddings=256,
        tie_embeddings=True,
        qkv_bias=True,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        initializer_range=0.25,
    )
    decoder = Decoder(config)
    decoder.initialize(torch.Generator().manual_seed(0))
    return decoder.to(DEVICE)


def _requests(
    count: int, *, lengths: tuple[int, int] = (1, 14), sampling: SamplingParams = SAMPLED
) -> list[GenerationRequest]:
    rng = random.Random(5)
    return [
        GenerationRequest(
            tuple(range(3 * i, 3 * i + 3)),
            tuple(rng.randrange(2, VOCABULARY) for _ in range(rng.randint(*lengths))),
            sampling,
        )
        for i in range(count)
    ]


def _drain(engine: PagedRolloutEngine | NativeRolloutEngine) -> dict[int, Completion]:
    finished: dict[int, Completion] = {}
    while completions := engine.advance():
        finished.update({completion.sample_id: completion for completion in completions})
    return finished


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
    return _drain(engine)


def _assert_same(actual: dict[int, Completion], expected: dict[int, Completion]) -> None:
    assert actual.keys() == expected.keys()
    for sample_id, completion in expected.items():
        ours = actual[sample_id]
        assert ours.token_ids == completion.token_ids, sample_id
        assert ours.finish_reason == completion.finish_reason
        torch.testing.assert_close(
            torch.tensor(ours.log_probs), torch.tensor(completion.log_probs), rtol=0, atol=2e-5
        )


@pytest.mark.parametrize(
    "sampling",
    [
        SAMPLED,
        replace(SAMPLED, temperature=0.0),
        replace(SAMPLED, top_k=5, max_new_tokens=2),
        replace(SAMPLED, top_p=0.7, max_new_tokens=2),
        replace(SAMPLED, top_k=8, top_p=0.8, max_new_tokens=2),
    ],
)
def test_tokens_are_those_of_the_dense_engine(decoder, sampling):
    requests = _requests(2, sampling=sampling)
    engine = PagedRolloutEngine(decoder, CONFIG, eager())
    engine.add(requests)
    _assert_same(_drain(engine), _expected(decoder, requests))


def test_prompts_and_responses_across_page_borders(decoder):
    lengths = (PAGE_TOKENS - 2, PAGE_TOKENS + 1)
    requests = _requests(2, lengths=lengths, sampling=replace(SAMPLED, ignore_eos=True))
    engine = PagedRolloutEngine(decoder, replace(CONFIG, busy_programs=16), eager())
    engine.add(requests)
    _assert_same(_drain(engine), _expected(decoder, requests))


def test_preempted_sequences_continue_with_the_same_tokens(decoder):
    sampling = replace(SAMPLED, max_new_tokens=22, ignore_eos=True)
    requests = _requests(1, lengths=(PAGE_TOKENS - 17, PAGE_TOKENS - 17), sampling=sampling)
    config = replace(CONFIG, max_cache_bytes=5 * PAGE_BYTES)
    engine = PagedRolloutEngine(decoder, config, eager())
    engine.add(requests)
    completions = _drain(engine)
    assert engine.num_preempted > 0
    _assert_same(completions, _expected(decoder, requests))
