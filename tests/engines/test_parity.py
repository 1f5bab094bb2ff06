# SPDX-License-Identifier: Apache-2.0
"""V1: what vLLM generates with is the trainer's model, for each family, before and after updates,
and no tensor can be left out or changed on the way.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.api import EngineFailure
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.vllm.engine import build
from tandem.testing.contracts.rollout import EngineBench, check_engine
from tandem.types import FinishReason
from tests.engines.bench import (
    EOS,
    FAMILIES,
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    transformers_log_probs,
    write_model,
)

pytest.importorskip("vllm", reason="needs vllm: make test-engines")


@pytest.fixture(scope="module", params=FAMILIES)
def bench(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineBench]:
    """An engine of each family. Its tests run in the order of this file."""
    folder = write_model(tmp_path_factory.mktemp("model"), request.param)
    with running(build, open_spec(folder)) as bench:
        yield bench


def test_vllm_keeps_the_promises_of_rollout_engines(tmp_path: Path) -> None:
    assert check_engine(build, tmp_path) == []


def test_v1_log_probs_are_those_of_the_trainer_and_of_transformers(
    bench: EngineBench, tmp_path: Path
) -> None:
    for version in range(2):
        if version:
            bench.use_new_weights(seed=version)
        asked = requests()
        found = bench.generate(asked)
        assert largest_error(bench, asked, found) <= MAX_ERROR
        for request in asked[:: len(asked) // 3]:  # one of each rule
            one = found[request.sample_ids[0]]
            expected_R = transformers_log_probs(bench.model, tmp_path / str(version), request, one)
            assert one.log_probs == pytest.approx(expected_R.tolist(), abs=MAX_ERROR)


def test_v1_a_response_ends_with_an_end_token_or_at_its_length(bench: EngineBench) -> None:
    asked = requests(n=8)
    found = bench.generate(asked)
    for request in asked:
        length, ignores = request.sampling.max_new_tokens, request.sampling.ignore_eos
        for one in (found[i] for i in request.sample_ids):
            assert 1 <= len(one.token_ids) <= length
            ends = one.token_ids[-1] in EOS and not ignores
            assert one.finish_reason == (FinishReason.STOP if ends else FinishReason.LENGTH)
            assert ends or len(one.token_ids) == length
            assert ignores or not set(one.token_ids[:-1]) & set(EOS)
    reasons = {one.finish_reason for one in found.values()}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}, "both kinds must have been seen"


def test_v1_an_update_without_a_tensor_is_refused_by_its_name(bench: EngineBench) -> None:
    sink = bench.engine.sink()
    assert sink is not None
    views = dict(checkpoint_views(bench.model))
    for missing, tensor in views.items():
        bench.version += 1
        sink.begin(bench.version)
        for name in views.keys() - {missing}:
            sink.take(name, views[name])
        with pytest.raises(EngineFailure, match=f"weights are missing: {missing}$"):
            sink.end()
        sink.take(missing, tensor)
        sink.end()
        bench.engine.set_weights_version(bench.version)
    asked = requests()
    assert largest_error(bench, asked, bench.generate(asked)) <= MAX_ERROR


def test_v1_a_tensor_changed_by_a_tenth_is_seen_by_the_canary(bench: EngineBench) -> None:
    """The change is a tenth of the tensor's size, in random directions.

    A factor would not do: behind some norms it has no effect.
    """
    sink = bench.engine.sink()
    assert sink is not None
    views, generator = dict(checkpoint_views(bench.model)), torch.Generator().manual_seed(5)
    unseen: list[str] = []
    for changed in views:
        bench.version += 1
        sink.begin(bench.version)
        for name, view in views.items():
            noise = torch.randn(view.shape, generator=generator) * view.square().mean().sqrt()
            sink.take(name, view + 0.1 * noise if name == changed else view)
        sink.end()
        bench.engine.set_weights_version(bench.version)
        try:
            bench.generate([bench.request(0)])
        except EngineFailure as failure:
            assert "was not loaded as the trainer has it" in str(failure)
        else:
            unseen.append(changed)
    assert unseen == []
