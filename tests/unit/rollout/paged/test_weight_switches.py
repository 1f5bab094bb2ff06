# SPDX-License-Identifier: Apache-2.0
"""Weights that change while the paged engine generates: the same tokens and versions as the dense
engine's, whatever is shared or preempted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.models.decoder import Decoder
from tandem.platforms.capture import eager
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.paged.cache import PAGE_TOKENS
from tandem.rollout.paged.engine import WINDOW_TOKENS, PagedRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.tiny_decoder import tiny_decoder

SAMPLED = SamplingParams(
    temperature=0.9, top_p=1.0, top_k=-1, max_new_tokens=WINDOW_TOKENS + 12, ignore_eos=True
)
PAGE_BYTES = 2 * 2 * 2 * PAGE_TOKENS * 16 * 4
CONFIG = NativeRolloutConfig(
    seed=11,
    eos_ids=(0, 1),
    max_num_seqs=4,
    max_num_batched_tokens=512,
    max_cache_bytes=256 * PAGE_BYTES,
)
REQUESTS = [
    GenerationRequest((0, 1), tuple(range(2, 2 + PAGE_TOKENS)), SAMPLED),
    GenerationRequest((2,), (9,), SAMPLED),
]


@pytest.fixture(scope="module")
def decoder(device: torch.device) -> Decoder:
    """Two layers, six heads over two key/value heads."""
    decoder = tiny_decoder(
        vocab_size=2 + PAGE_TOKENS, num_heads=6, head_dim=16, tie_embeddings=False
    )
    return decoder.to(device)


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


def paged(decoder: Decoder) -> PagedRolloutEngine:
    return PagedRolloutEngine(decoder, CONFIG, capturer=eager(), busy_programs=2)


def drain(engine: PagedRolloutEngine | NativeRolloutEngine) -> dict[int, Completion]:
    finished: dict[int, Completion] = {}
    while completions := engine.advance():
        finished.update({completion.sample_id: completion for completion in completions})
    return finished


def test_a_switch_gives_the_tokens_of_the_dense_engine(decoder: Decoder) -> None:
    engine = paged(decoder)
    engine.add(REQUESTS)
    assert engine.advance(max_steps=WINDOW_TOKENS) == []
    engine.settle()
    with other_weights(decoder):
        assert engine.set_weights_version(1)
        finished = drain(engine)
    assert engine.num_preempted == 3
    (num_old,) = {completion.version_runs[0][1] for completion in finished.values()}
    assert 0 < num_old < SAMPLED.max_new_tokens
    dense = NativeRolloutEngine(decoder, CONFIG)
    dense.add(REQUESTS)
    dense.advance(max_steps=num_old - 1)
    with other_weights(decoder):
        dense.set_weights_version(1)
        expected = drain(dense)
    for sample_id, completion in expected.items():
        ours = finished[sample_id]
        assert ours.token_ids == completion.token_ids
        assert ours.version_runs == completion.version_runs
        assert ours.log_probs == pytest.approx(completion.log_probs, abs=2e-5)


def test_what_ends_while_the_engine_settles_is_not_lost(decoder: Decoder) -> None:
    engine = paged(decoder)
    short = SamplingParams(1.0, 1.0, -1, max_new_tokens=3, ignore_eos=True)
    engine.add([GenerationRequest((0,), (5, 6), short), *REQUESTS[1:]])
    assert engine.advance(max_steps=1) == []
    engine.set_weights_version(1)
    finished = drain(engine)
    assert finished[0].version_runs == ((0, 3),)
    assert [version for version, _ in finished[2].version_runs] == [0, 1]
