# SPDX-License-Identifier: Apache-2.0
"""V4: vLLM's prefix cache holds nothing of older weights, and each of its two guards is enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from tandem.rollout.vllm.engine import VllmRolloutEngine, build
from tandem.testing.contracts.check import ContractError
from tandem.testing.contracts.rollout import EngineBench
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    write_model,
)

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

BLOCK = 32
LENGTH = 100
"""The shortest prompt, in tokens: three blocks and a part of one."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineBench]:
    folder = write_model(tmp_path_factory.mktemp("model"), "qwen2 untied")
    keys = {"engine_kwargs": {"vllm": {"block_size": BLOCK}}, "disable_log_stats": False}
    with running(build, open_spec(folder, **keys)) as bench:
        yield bench


def _error_over_versions(bench: EngineBench) -> float:
    """Return the largest error of the same prompts under three versions."""
    worst = 0.0
    for seed in range(3):
        bench.use_new_weights(seed)
        for _ in range(2):  # the second time from the cache
            asked = requests(first_id=1000, length=LENGTH)
            worst = max(worst, largest_error(bench, asked, bench.generate(asked)))
    return worst


def _never_resets(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "reset_prefix_cache", lambda **_: True)


def _has_no_salt(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add: Callable[..., Any] = engine.add_request

    def add_without(name: str, prompt: Mapping[str, Any], *args: Any, **keys: Any) -> None:
        add(name, {"prompt_token_ids": prompt["prompt_token_ids"]}, *args, **keys)

    monkeypatch.setattr(engine, "add_request", add_without)


@pytest.mark.parametrize(
    "mutations",
    [(), (_never_resets,), (_has_no_salt,)],
    ids=["both guards", "the salt alone", "the reset alone"],
)
def test_v4_the_same_prompts_are_right_under_three_versions(
    bench: EngineBench, mutations: tuple[Callable[..., None], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(bench.engine, VllmRolloutEngine)
    for mutate in mutations:
        mutate(bench.engine._engine, monkeypatch)
    before = bench.engine.metrics()
    assert _error_over_versions(bench) <= MAX_ERROR
    after = bench.engine.metrics()
    counted = {name: after[name] - before[name] for name in after}
    num_prompts = sum(len(r.prompt_ids) * len(r.sample_ids) for r in requests(length=LENGTH))
    cached, prefilled = counted["num_cached_tokens"], counted["num_prefilled_tokens"]
    assert cached + prefilled == 6 * num_prompts
    assert cached > num_prompts, "the cache must have been used"
    assert counted["vllm_prefix_cache_hits"] == cached
    assert counted["vllm_generation_tokens"] >= counted["num_decoded_tokens"]


def test_v4_without_salt_and_reset_the_check_fails(
    bench: EngineBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(bench.engine, VllmRolloutEngine)
    _never_resets(bench.engine._engine, monkeypatch)
    _has_no_salt(bench.engine._engine, monkeypatch)
    with pytest.raises((AssertionError, ContractError)):
        assert _error_over_versions(bench) <= MAX_ERROR
