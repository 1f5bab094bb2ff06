# SPDX-License-Identifier: Apache-2.0
"""V8: an engine over two processes passes V1 to V6, also with the head of a tied model in its files
and with a cache that is kept, and notices ranks that are told different things.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tandem.api import EngineFailure
from tandem.rollout.factory import build_dense
from tandem.rollout.vllm.engine import build
from tandem.types import GenerationRequest, SamplingParams
from tests.distributed.spawn import run_ranks
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    scheduling_ahead,
    tokens_of,
    write_model,
)
from tests.engines.parity import (
    check_tensors_that_are_left_out,
    check_versions,
    tensors_that_pass_a_tenth_off,
    write_tied_model_with_a_head,
)

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128}
LONG = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=40, ignore_eos=True)
PROMPT = tuple(range(2, 82))


KEYS = {"name": "vllm", "tensor_model_parallel_size": 2}
TIMEOUT_S = 900.0
BLOCKS = {"engine_kwargs": {"vllm": {"block_size": 32}}}


def _run_rank(rank: int, size: int, store_port: int, folder: Path) -> dict[str, Any]:
    """Do the same on each rank but the last request, and return what the tests look at.

    Steps are scheduled ahead here, and not in ``_update_rank``.
    """
    facts: dict[str, Any] = {}
    with scheduling_ahead(), running(build, open_spec(folder, **KEYS, **BLOCKS)) as bench:
        facts["tokens"] = tokens_of(bench.generate(requests(n=17)))
        errors: list[float] = []
        for seed in range(3):  # the same prompts under three versions
            bench.use_new_weights(seed)
            asked = requests(first_id=1000, length=100)
            errors.append(largest_error(bench, asked, bench.generate(asked)))
        facts["errors"] = errors
        request = GenerationRequest((5000, 5001), PROMPT, LONG)
        first = bench.version
        bench.rollout.add([request])
        early = bench.rollout.advance(10)
        bench.use_new_weights(seed=9)
        found = bench.drain([request], early)
        facts["spans"] = {one.version_runs for one in found.values()}
        facts["expected spans"] = {((first, 10), (first + 1, LONG.max_new_tokens - 10))}
        bench.rollout.add([GenerationRequest((6000, 6001), PROMPT[rank:], LONG)])
        try:
            bench.rollout.advance(1)
        except EngineFailure as failure:
            facts["failure"] = str(failure)
    return facts


def _update_rank(rank: int, size: int, store_port: int, folder: Path) -> dict[str, Any]:
    """Update an engine that keeps its cache, with right and with wrong tensors."""
    keys = {**KEYS, **BLOCKS, "partial_rollout": "keep_cache", "load_format": "safetensors"}
    with running(build, open_spec(folder, **keys)) as bench:
        check_versions(bench)
        old = GenerationRequest((7000,), PROMPT, LONG)
        bench.rollout.add([old])
        early = bench.rollout.advance(10)
        bench.use_new_weights(seed=50)
        request = GenerationRequest((8000, 8001), PROMPT, LONG)
        bench.rollout.add([request])
        found = bench.drain([old, request], early)
        facts: dict[str, Any] = {"error": largest_error(bench, [request], found)}
        facts["versions"] = {run for i in request.sample_ids for run in found[i].version_runs}
        facts["expected versions"] = {(bench.version, LONG.max_new_tokens)}
        check_tensors_that_are_left_out(bench)
        facts["unseen"] = tensors_that_pass_a_tenth_off(bench)
    return facts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen2 tied", **SIZES)


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Sequence[dict[str, Any]]:
    """What each of two processes found."""
    return run_ranks(_run_rank, 2, folder, timeout_s=TIMEOUT_S)


def test_v8_tokens_of_two_ranks_are_those_of_the_native_engine(
    folder: Path, ranks: Sequence[Mapping[str, Any]]
) -> None:
    with running(build_dense, open_spec(folder)) as bench:
        expected = tokens_of(bench.generate(requests(n=17)))
    assert [facts["tokens"] for facts in ranks] == [expected, expected]


def test_v8_log_probs_are_the_trainers_under_each_version(
    ranks: Sequence[Mapping[str, Any]],
) -> None:
    for facts in ranks:
        assert len(facts["errors"]) == 3
        assert max(facts["errors"]) <= MAX_ERROR


def test_v8_each_token_has_its_version(ranks: Sequence[Mapping[str, Any]]) -> None:
    for facts in ranks:
        assert facts["spans"] == facts["expected spans"]


def test_v8_ranks_that_are_told_different_things_notice_it_at_once(
    ranks: Sequence[Mapping[str, Any]],
) -> None:
    for facts in ranks:
        assert facts["failure"] == (
            "vLLM: rank 1 of an engine over 2 devices was given other requests than rank 0, or "
            "drew other tokens"
        )


def test_v8_a_tied_model_with_a_head_and_a_kept_cache_is_updated_right_over_two_ranks(
    tmp_path: Path,
) -> None:
    """On both ranks, each tensor that is left out is named, and each that is wrong is seen."""
    write_tied_model_with_a_head(tmp_path, **SIZES)
    for facts in run_ranks(_update_rank, 2, tmp_path, timeout_s=TIMEOUT_S):
        assert facts["error"] <= MAX_ERROR
        assert facts["versions"] == facts["expected versions"]
        assert facts["unseen"] == []
