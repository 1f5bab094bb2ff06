# SPDX-License-Identifier: Apache-2.0
"""V5: weights that change within sequences. Each token belongs to the version that drew it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import product
from pathlib import Path

import pytest
import torch

from tandem.rollout.vllm.engine import build
from tandem.testing.contracts.rollout import EngineBench, check_engine
from tandem.types import GenerationRequest, SamplingParams
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    running,
    scheduling_ahead,
    write_model,
)
from tests.fakes.generation import change

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

LONG = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=60, ignore_eos=True)
PROMPT = tuple(range(2, 82))
SWITCHES = (7, 20, 33)
"""Decode steps, counted from the first, after which new weights come."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2 tied")


@pytest.fixture(
    scope="module",
    params=product((True, "keep_cache"), (nullcontext, scheduling_ahead)),
    ids=["recompute", "recompute, ahead", "keep_cache", "keep_cache, ahead"],
)
def bench(request: pytest.FixtureRequest, folder: Path) -> Iterator[EngineBench]:
    partial_rollout, scheduling = request.param
    keys = {"engine_kwargs": {"vllm": {"block_size": 32}}, "max_num_batched_tokens": 512}
    spec = open_spec(folder, partial_rollout=partial_rollout, **keys)
    with scheduling(), running(build, spec) as bench:
        yield bench


def test_v5_each_token_has_the_log_prob_of_its_version(bench: EngineBench) -> None:
    request = GenerationRequest((0, 1, 2, 3), PROMPT, LONG)
    first, done = bench.version, 0
    weights = [bench.weights()]
    bench.rollout.add([request])
    for num_steps in SWITCHES:
        assert bench.rollout.advance(num_steps - done) == []
        done = num_steps
        bench.use_new_weights(seed=num_steps)
        weights.append(bench.weights())
    found = bench.drain([request])
    # The prompt is prefilled in the first step, which draws the first token.
    bounds = (0, *SWITCHES, LONG.max_new_tokens)
    spans = [
        (first + i, end - start)
        for i, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True))
    ]
    keeps_cache = bench.engine.facts.keeps_cache
    for one in found.values():
        assert list(one.version_runs) == spans
        for number, (start, end) in enumerate(zip(bounds[:-1], bounds[1:], strict=True)):
            if number and keeps_cache:
                break  # keys and values of several versions: no model has these log-probs
            _load(bench, weights[number])
            expected = bench.log_probs(request, one)[start:end].tolist()
            assert list(one.log_probs[start:end]) == pytest.approx(expected, abs=MAX_ERROR)
    _load(bench, weights[-1])


def test_v5_new_requests_of_an_old_prompt_get_the_new_weights_alone(bench: EngineBench) -> None:
    """Samples of the same prompts are under way when the weights change."""
    for seed in (50, 51):
        old = GenerationRequest((800 + seed,), PROMPT, LONG)
        bench.rollout.add([old])
        early = bench.rollout.advance(10)
        bench.use_new_weights(seed=seed)
        request = GenerationRequest((900 + seed, 950 + seed), PROMPT, LONG)
        bench.rollout.add([request])
        found = bench.drain([old, request], early)
        assert largest_error(bench, [request], found) <= MAX_ERROR
        versions = {version for i in request.sample_ids for version, _ in found[i].version_runs}
        assert versions == {bench.version}


def test_v5_new_weights_wait_for_the_step_that_is_ahead(folder: Path) -> None:
    spec = open_spec(folder, partial_rollout=True, max_num_batched_tokens=512)
    with scheduling_ahead(), running(build, spec) as bench:
        request = GenerationRequest((0, 1), PROMPT, LONG)
        bench.rollout.add([request])
        assert bench.rollout.advance(7) == []
        change(bench.model, seed=1)
        bench.rollout.set_weights_version(1)
        for one in bench.drain([request]).values():
            assert one.version_runs == ((0, 7), (1, LONG.max_new_tokens - 7))
            expected = bench.log_probs(request, one)[7:].tolist()
            assert list(one.log_probs[7:]) == pytest.approx(expected, abs=MAX_ERROR)


def test_v1_an_engine_that_schedules_ahead_keeps_the_promises(tmp_path: Path) -> None:
    with scheduling_ahead():
        assert check_engine(build, tmp_path) == []


def _load(bench: EngineBench, weights: list[torch.Tensor]) -> None:
    for weight, values in zip(bench.model.module.parameters(), weights, strict=True):
        weight.copy_(values)
