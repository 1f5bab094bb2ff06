# SPDX-License-Identifier: Apache-2.0
"""A rollout frees its memory while the device trains, and generates the same afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.models.decoder import Decoder
from tandem.models.language_model import NativeModel
from tandem.rollout.native.engine import NativeRolloutEngine
from tandem.rollout.settings import NativeRolloutConfig
from tandem.types import Completion, GenerationRequest, SamplingParams
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.gate import WeightGate
from tandem.workers.generation import LinkedRollout
from tests.fakes.tiny_decoder import tiny_decoder

CONFIG = NativeRolloutConfig(
    seed=1, eos_ids=(0,), max_num_seqs=8, max_num_batched_tokens=64, max_cache_bytes=1 << 30
)
REQUEST = GenerationRequest(
    (0, 1), (5, 6, 7), SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=4)
)


def _linked(engine: NativeRolloutEngine, decoder: Decoder) -> LinkedRollout:
    policy = NativeModel(decoder, hf_config={}, source=Path())
    return LinkedRollout(engine, policy, keeps_policy=False)


def _decoder() -> Decoder:
    return tiny_decoder().requires_grad_(False)


def _generate(engine: NativeRolloutEngine) -> list[Completion]:
    engine.add([REQUEST])
    completions: list[Completion] = []
    while finished := engine.advance():
        completions += finished
    return sorted(completions, key=lambda completion: completion.sample_id)


def _held_bytes(decoder: Decoder, engine: NativeRolloutEngine) -> int:
    weights = {weight.untyped_storage() for weight in decoder.parameters()}
    return sum(storage.nbytes() for storage in weights) + engine._cache.num_bytes


def test_it_holds_nothing_while_it_sleeps_and_generates_the_same_with_the_weights_back() -> None:
    decoder, gate = _decoder(), WeightGate(3)
    engine = NativeRolloutEngine(decoder, CONFIG)
    rollout = _linked(engine, decoder)
    expected = _generate(engine)
    weights = [weight.clone() for weight in decoder.parameters()]
    num_bytes = _held_bytes(decoder, engine)
    assert engine._cache.num_bytes > 0

    rollout.sleep(gate, timeout_s=1)
    rollout.sleep(gate, timeout_s=1)
    assert _held_bytes(decoder, engine) == 0
    with pytest.raises(SyncError, match="cannot be used: the device trains"), gate.reading(1):
        pass

    rollout.prepare()
    rollout.prepare()
    for weight, kept in zip(decoder.parameters(), weights, strict=True):
        weight.copy_(kept)
    gate.publish(4)
    assert _generate(engine) == expected
    assert _held_bytes(decoder, engine) == num_bytes


def test_it_does_not_sleep_with_work_or_before_weights_have_come() -> None:
    decoder, gate = _decoder(), WeightGate()
    engine = NativeRolloutEngine(decoder, CONFIG)
    rollout = _linked(engine, decoder)
    rollout.sleep(gate, timeout_s=1)
    assert decoder.lm_head_weight.untyped_storage().nbytes() > 0
    gate.publish(0)
    engine.add([REQUEST])
    rollout.sleep(gate, timeout_s=1)
    assert decoder.lm_head_weight.untyped_storage().nbytes() > 0
    assert gate.version == 0
    assert engine.advance()


def test_memory_that_is_the_trainers_stays_while_it_sleeps() -> None:
    decoder, gate = _decoder(), WeightGate(3)
    policy = NativeModel(decoder, hf_config={}, source=Path())
    shared = {"layers.1.down.weight"}
    rollout = LinkedRollout(
        NativeRolloutEngine(decoder, CONFIG), policy, keeps_policy=False, shared=shared
    )
    rollout.sleep(gate, timeout_s=1)
    held = {x for x, weight in decoder.named_parameters() if weight.untyped_storage().nbytes()}
    assert held == shared
