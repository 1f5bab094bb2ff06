# SPDX-License-Identifier: Apache-2.0
"""V8 for mixtures of experts: vLLM over two processes, which split the matrices of each expert, or
divide the experts (``rollout.expert_parallel_size=2``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tandem.comm.store import connect_store
from tandem.quickstart.tokenizer import END_ID, PAD_ID
from tandem.rollout.factory import build_dense
from tandem.rollout.feed import checkpoint_views
from tandem.rollout.vllm.engine import build
from tandem.testing.contracts.rollout import EngineBench
from tests.distributed.spawn import HOST, run_ranks
from tests.engines.bench import (
    MAX_ERROR,
    largest_error,
    open_spec,
    requests,
    running,
    tokens_of,
    write_model,
)
from tests.engines.parity import (
    check_tensors_that_are_left_out,
    is_seen,
    tensors_that_pass_a_tenth_off,
)
from tests.fakes.commands import run_command
from tests.fakes.tiny_policy import write_tiny_tokenizer
from tests.fakes.tiny_run import Material, metrics_of, repeatable, train_arguments

pytest.importorskip("vllm", reason="needs vllm: make test-engines")

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "glm4_moe", "dots1")
SIZES = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "intermediate_size": 128,
}
"""A device has a multiple of 32 of the rows of an expert, which vLLM's kernel for CPUs needs."""
BLOCKS = {"engine_kwargs": {"vllm": {"block_size": 32}}}
EXPERTS_OF_RANK = ({"0", "1"}, {"2", "3"})
MOST_VERSIONS = 32
"""How many versions a changed expert stays: then each token of the vocabulary was in a canary."""
TIMEOUT_S = 1200.0
ROLLOUT = "actor_rollout_ref.rollout"
OVER_TWO = (f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2")


def _keys(division: str) -> dict[str, Any]:
    size = 2 if division == "experts" else 1
    return {**BLOCKS, "name": "vllm", "tensor_model_parallel_size": 2, "expert_parallel_size": size}


def _run_rank(rank: int, size: int, store_port: int, folder: Path, division: str) -> dict[str, Any]:
    """Do the same on each rank but in the end, and return what the tests look at."""
    with running(build, open_spec(folder, **_keys(division))) as bench:
        facts: dict[str, Any] = {"tokens": tokens_of(bench.generate(requests()))}
        errors: list[float] = []
        for seed in range(3):
            bench.use_new_weights(seed)
            asked = requests(first_id=1000)
            errors.append(largest_error(bench, asked, bench.generate(asked)))
        facts["errors"] = errors
        check_tensors_that_are_left_out(bench, names=_expert_names(bench)[::5])
        facts["unseen"] = tensors_that_pass_a_tenth_off(bench)
        if division == "experts":
            facts["seen"] = _experts_that_matter(bench, rank)
    return facts


def _expert_names(bench: EngineBench) -> list[str]:
    return [name for name, _ in checkpoint_views(bench.model) if ".experts." in name]


def _experts_that_matter(bench: EngineBench, rank: int) -> set[str]:
    """Change each expert of the first layer on the first rank alone, and return those seen there.

    Both ranks take part in each version, and add up their experts.
    """
    views, seen = dict(checkpoint_views(bench.model)), set[str]()
    for number in range(4):
        name = f"model.layers.0.mlp.experts.{number}.down_proj.weight"
        given = views | ({name: -views[name]} if rank == 0 else {})
        if any(is_seen(bench, given) for _ in range(MOST_VERSIONS)):
            seen.add(str(number))
    return seen


def _join_again(rank: int, size: int, store_port: int, name: str) -> None:
    """Join a world if there is none: vLLM ends it with an engine."""
    if not dist.is_initialized():
        store = dist.PrefixStore(name, connect_store(HOST, store_port, timeout_s=TIMEOUT_S))
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def _errors_of_families(rank: int, size: int, store_port: int, folder: Path) -> dict[str, float]:
    """Return the largest error of log-probs after an update, for each family and division."""
    found: dict[str, float] = {}
    for family in FAMILIES[1:]:
        for division in ("matrices", "experts"):
            _join_again(rank, size, store_port, f"{family} {division}")
            with running(build, open_spec(folder / family, **_keys(division))) as bench:
                bench.use_new_weights(seed=1)
                asked = requests()
                error = largest_error(bench, asked, bench.generate(asked))
                found[f"{family}, {division} divided"] = error
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), "qwen3_moe", **SIZES)


@pytest.fixture(scope="module")
def expected(folder: Path) -> Mapping[int, Sequence[int]]:
    with running(build_dense, open_spec(folder)) as bench:
        return tokens_of(bench.generate(requests()))


# Split matrices are those of any model; each family's log-probs with them are compared below.
@pytest.mark.parametrize("division", [pytest.param("matrices", marks=pytest.mark.deep), "experts"])
def test_v8_experts_over_two_ranks(
    folder: Path, expected: Mapping[int, Sequence[int]], division: str
) -> None:
    """Tokens are those of the native engine, log-probs those of the trainer under each version.

    On both ranks, a tensor that is left out is named, and one that is wrong is seen. If experts are
    divided, a wrong one is seen only on the rank that has it.
    """
    ranks = run_ranks(_run_rank, 2, folder, division, timeout_s=TIMEOUT_S)
    for facts in ranks:
        assert facts["tokens"] == expected
        assert len(facts["errors"]) == 3
        assert max(facts["errors"]) <= MAX_ERROR
        assert facts["unseen"] == []
        if division == "experts":
            assert facts["seen"] == EXPERTS_OF_RANK[0], "rank 0 was given wrong tensors"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with experts for runs."""
    folder = tmp_path_factory.mktemp("policy")
    vocabulary = write_tiny_tokenizer(folder).get_vocab_size()
    sizes = {"vocab_size": vocabulary, "eos_token_id": END_ID, "pad_token_id": PAD_ID}
    return write_model(folder, "qwen3_moe", **SIZES, **sizes)


def test_v8_a_run_whose_engine_divides_experts_is_that_of_the_native_engine(
    material: Material, policy: Path, tmp_path: Path
) -> None:
    """Three steps over two devices, which vLLM shares with the trainer."""
    rows: dict[str, dict[int, dict[str, float]]] = {}
    for name, keys in (("native", ()), ("vllm", OVER_TWO)):
        arguments = train_arguments(
            material,
            tmp_path / name / "run",
            f"actor_rollout_ref.model.path={policy}",
            f"{ROLLOUT}.name={name}",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "trainer.n_gpus_per_node=2",
            "trainer.total_training_steps=3",
            *keys,
        )
        ended = run_command(arguments, folder=tmp_path / name)
        assert ended.code == 0, ended.stderr
        rows[name] = metrics_of(tmp_path / name / "run")
    for step in (1, 2, 3):
        assert rows["vllm"][step]["training/rollout_logp_diff_max"] <= MAX_ERROR
        assert rows["vllm"][step]["actor/grad_norm"] > 0
    for step, row in repeatable(rows["native"]).items():
        for metric, value in row.items():
            found = rows["vllm"][step][metric]
            assert found == pytest.approx(value, rel=1e-4, abs=1e-4), (step, metric)


def test_v8_log_probs_of_each_family_over_two_ranks(tmp_path: Path) -> None:
    for family in FAMILIES[1:]:
        write_model(tmp_path / family, family, **SIZES)
    for found in run_ranks(_errors_of_families, 2, tmp_path, timeout_s=TIMEOUT_S):
        assert len(found) == 2 * len(FAMILIES[1:])
        assert {name: error for name, error in found.items() if not error <= MAX_ERROR} == {}
