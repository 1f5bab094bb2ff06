# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine, with the real vLLM on the CPU: the contract suite, the tokens of the
native engine, and the canary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tandem.api import EngineFailure, Rollout
from tandem.config.schema.rollout import RolloutConfig
from tandem.models.folder import open_model
from tandem.models.language_model import LanguageModel
from tandem.platforms.record import CPU
from tandem.rollout.factory import EngineSpec, build_dense
from tandem.rollout.feed import FedRollout, WeightFeed, checkpoint_views
from tandem.rollout.vllm.engine import VllmRolloutEngine, build
from tandem.testing.contracts.rollout import check_engine
from tandem.types import Completion, GenerationRequest, SamplingParams
from tests.fakes.tiny_qwen2 import write_random_qwen2

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

EOS = (0, 1)
RULES = (
    SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=24),
    SamplingParams(temperature=0.7, top_p=0.8, top_k=20, max_new_tokens=24),
    SamplingParams(temperature=0.0, top_p=1.0, top_k=-1, max_new_tokens=24),
)
CONFIG = RolloutConfig(max_num_seqs=8, max_num_batched_tokens=64, seed=3)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def spec(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> EngineSpec:
    """A model with large random weights, which make stale ones visible."""
    folder = tmp_path_factory.mktemp("qwen2")
    write_random_qwen2(folder, tied=request.param)
    model = open_model(str(folder), dtype=torch.float32, device="cpu")
    model.module.requires_grad_(False)
    return EngineSpec(model, folder, CONFIG, EOS, CPU)


@pytest.fixture(scope="module")
def engine(spec: EngineSpec) -> Iterator[VllmRolloutEngine]:
    """An engine without weights."""
    engine = build(spec)
    yield engine
    engine.close()


def _requests() -> list[GenerationRequest]:
    """Requests for 72 samples with all rules; prompts are longer than a block of the cache."""
    prompts = [tuple(4 + (7 * i + j) % 90 for j in range(20 + 20 * (i % 3))) for i in range(6)]
    ids = iter(range(1000))
    return [
        GenerationRequest(tuple(next(ids) for _ in range(4)), prompt, rule)
        for rule in RULES
        for prompt in prompts
    ]


def _generate(rollout: Rollout, requests: Sequence[GenerationRequest]) -> dict[int, Completion]:
    rollout.add(requests)
    finished: dict[int, Completion] = {}
    while completions := rollout.advance():
        finished |= {one.sample_id: one for one in completions}
    return finished


def _change(model: LanguageModel, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for weight in model.module.parameters():
        weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def test_vllm_keeps_the_promises_of_rollout_engines(tmp_path: Path) -> None:
    assert check_engine(build, tmp_path) == []


def test_its_tokens_are_those_of_the_native_engine(
    spec: EngineSpec, engine: VllmRolloutEngine
) -> None:
    native = build_dense(spec)
    rollout = FedRollout(engine, WeightFeed(spec.model, engine.sink()))
    for version in range(3):
        if version:
            _change(spec.model, seed=version)
        rollout.set_weights_version(version)
        native.set_weights_version(version)
        found, expected = _generate(rollout, _requests()), _generate(native, _requests())
        assert found.keys() == expected.keys()
        for sample_id, one in expected.items():
            assert list(found[sample_id].token_ids) == list(one.token_ids)
            assert list(found[sample_id].log_probs) == pytest.approx(list(one.log_probs), abs=1e-4)


def test_the_canary_finds_weights_that_are_not_the_trainers(
    spec: EngineSpec, engine: VllmRolloutEngine
) -> None:
    sink = engine.sink()
    sink.begin(9)
    for name, view in checkpoint_views(spec.model):
        sink.take(name, view)
    _change(spec.model, seed=9)
    sink.end()
    engine.set_weights_version(9)
    engine.add(_requests()[:1])
    with pytest.raises(EngineFailure, match="version 9 was not loaded as the trainer has it"):
        while True:
            engine.advance()
