# SPDX-License-Identifier: Apache-2.0
"""Adapters over several ranks: L7 and L8 (an update is that of one device), L9 (checkpoints across
numbers of ranks), and the reference, which computes with the trainer's base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tandem.api import Scores
from tandem.config.derived.adapters import ADAPTER_WEIGHTS, Adapters
from tandem.config.derived.pools import rank_layout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.optim import OptimConfig
from tandem.models.adapters import adapter_tensors
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    TEMPERATURE,
    Case,
    Outcome,
    assembled,
    deal,
    open_engine,
    open_single,
    train_rank,
    train_single,
)
from tests.fakes.tiny_adapters import ALL, open_adapted, spread_b
from tests.unit.models.tiny_models import NATIVE, write_hf

OPTIM = OptimConfig(lr=2e-3, clip_grad=0.5)
SPLIT = {"tensor_model_parallel_size": 2}


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[Case]:
    """Ways to train adapters that have an effect from the start, one of them over a bf16 base."""
    root = tmp_path_factory.mktemp("adapters")
    write_hf(NATIVE["qwen3_biases"](), root / "base")
    some = replace(ALL, targets=("q_proj", "v_proj", "up_proj", "o_proj"))
    starts: list[Adapters] = []
    for name, adapters in (("all", ALL), ("some", some)):
        model = open_adapted(root / "base", adapters)
        spread_b(model)
        (root / name).mkdir()
        model.save(root / name)
        starts.append(replace(adapters, folder=root / name))
    whole, part = (Case(root / "base", OPTIM, adapters=start) for start in starts)
    return [
        replace(part, recompute=True, config={"reshard_after_forward": False}),
        replace(whole, config=SPLIT),
        replace(whole, config={"ulysses_sequence_parallel_size": 2}),
        replace(whole, config={"fsdp_size": 1, "optimizer_offload": True, "param_offload": True}),
        replace(whole, compute=torch.bfloat16),
        replace(part, config={"pipeline_model_parallel_size": 2}),
    ]


def _train_all(
    rank: int, size: int, store_port: int, cases: Sequence[Case], folder: Path
) -> list[tuple[Outcome, list[Scores], list[Scores]]]:
    """Return for each case what training did, and the reference's log-probs before and after."""
    found = []
    for number, case in enumerate(cases):
        engine = open_engine(case, rank=rank, size=size)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        before = engine.score_initial(batches, TEMPERATURE, num_rounds=num_rounds)
        outcome = train_rank(engine, batches, num_rounds=num_rounds)
        engine.save(folder / str(number))
        after = engine.score_initial(batches, TEMPERATURE, num_rounds=num_rounds)
        found.append((outcome, before, after))
    return found


def test_l7_l8_two_ranks_train_what_one_device_trains(cases: list[Case], tmp_path: Path) -> None:
    for number in range(len(cases)):
        (tmp_path / str(number)).mkdir()
    ranks = run_ranks(_train_all, 2, cases, tmp_path)
    for number, case in enumerate(cases):
        outcomes = [rank[number][0] for rank in ranks]
        _check(case, outcomes)
        for _, before, after in (rank[number] for rank in ranks):
            assert all(
                torch.equal(x.score_R, y.score_R) for x, y in zip(before, after, strict=True)
            )
        _check_checkpoint(case, outcomes, tmp_path / str(number))


def _check(case: Case, ranks: Sequence[Outcome]) -> None:
    # Sums over two ranks are in another order. In bf16 each of them is rounded.
    tolerance = 1e-5 if case.compute == torch.float32 else 4e-3
    engine, weights = open_single(case)
    reports, scores = train_single(engine, case)
    for actual, expected in zip(ranks[0].reports, reports, strict=True):
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=10 * tolerance)
    found = assembled(part for rank in ranks for part in rank.parts)
    assert found.keys() == weights.keys()
    for name, expected in weights.items():
        assert "lora" in name
        assert found[name].dtype == torch.float32
        assert float((found[name] - expected).abs().max()) < tolerance, (name, case)
    layout = rank_layout(FsdpConfig(**case.config), len(ranks))
    last_stage = ranks[-layout.ranks_per_stage :: layout.ranks_per_microbatch]
    groups = [rank.log_probs for rank in last_stage]
    for index, expected in enumerate(scores):
        actual = groups[index % len(groups)][index // len(groups)]
        torch.testing.assert_close(actual, expected.score_R, rtol=0, atol=20 * tolerance)


def _check_checkpoint(case: Case, ranks: Sequence[Outcome], folder: Path) -> None:
    """L9: the folder is an adapter of PEFT's form, and one device continues from it."""
    trained = assembled(part for rank in ranks for part in rank.parts)
    saved = load_file(folder / ADAPTER_WEIGHTS)
    config = case.model.decoder_config
    assert config is not None
    for tensor in adapter_tensors(config):
        rows = trained[tensor.parameter][tensor.start : tensor.start + tensor.rows]
        assert torch.equal(saved[tensor.name], rows)
    engine, weights = open_single(case)
    engine.load(folder)
    assert all(torch.equal(trained[name], weights[name]) for name in weights)


def _continue(
    rank: int, size: int, store_port: int, case: Case, folder: Path
) -> tuple[Outcome, Outcome]:
    """Train from a checkpoint of one device, after its values have been read."""
    engine = open_engine(case, rank=rank, size=size)
    engine.load(folder)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    loaded = train_rank(engine, batches, num_rounds=num_rounds, num_steps=0)
    return loaded, train_rank(engine, batches, num_rounds=num_rounds, num_steps=2)


def test_l9_two_ranks_continue_what_one_device_began(cases: list[Case], tmp_path: Path) -> None:
    case = cases[0]
    engine, weights = open_single(case)
    train_single(engine, case, num_steps=2)
    engine.save(tmp_path)
    begun = {name: weight.clone() for name, weight in weights.items()}
    ranks = run_ranks(_continue, 2, case, tmp_path)
    loaded = assembled(part for rank in ranks for part in rank[0].parts)
    assert all(torch.equal(loaded[name], begun[name]) for name in begun)
    train_single(engine, case, num_steps=2)
    ended = assembled(part for rank in ranks for part in rank[1].parts)
    for name, expected in weights.items():
        assert float((ended[name] - expected).abs().max()) < 1e-5
