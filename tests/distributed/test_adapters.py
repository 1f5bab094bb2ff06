# SPDX-License-Identifier: Apache-2.0
"""Adapters over several ranks: L7 and L8 (gradients and updates are those of one device), L9
(checkpoints across numbers of ranks), and the reference, which computes with the trainer's base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tandem.api import Scores
from tandem.config.derived.adapters import ADAPTER_WEIGHTS, Adapters
from tandem.config.derived.pools import rank_layout
from tandem.config.schema.fsdp import FsdpConfig
from tandem.config.schema.optim import OptimConfig
from tandem.engines.fsdp import FsdpEngine
from tandem.engines.single import SingleDeviceEngine
from tandem.models.adapters import adapter_tensors
from tandem.models.parallel import slices_of_rows
from tandem.types import SliceSpec
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    TEMPERATURE,
    Case,
    Outcome,
    assembled,
    copied_parts,
    deal,
    open_engine,
    open_single,
    train_rank,
    train_single,
)
from tests.fakes.tiny_adapters import ALL, open_adapted, spread_b
from tests.unit.models.tiny_models import NATIVE, write_hf

OPTIM = OptimConfig(lr=2e-3, clip_grad=0.5)
UNCLIPPED = OptimConfig(lr=2e-3, clip_grad=1e9)
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


Parts = list[tuple[SliceSpec, Tensor]]


def _keep_gradients(engine: FsdpEngine | SingleDeviceEngine) -> dict[str, Tensor]:
    """Return a mapping that will hold the gradients that the optimizer is given."""
    kept: dict[str, Tensor] = {}
    optimizer = engine._optimizer
    step = optimizer.step

    def keep(weights: Any, gradients: Mapping[str, Tensor], *, rate_factor: float) -> None:
        kept.update({name: gradient.clone() for name, gradient in gradients.items()})
        step(weights, gradients, rate_factor=rate_factor)

    optimizer.step = keep
    return kept


def _first_update(
    rank: int, size: int, store_port: int, cases: Sequence[Case]
) -> list[tuple[Parts, Parts]]:
    """Return for each case a rank's parts of the first gradients, and of the weights after them."""
    found: list[tuple[Parts, Parts]] = []
    for case in cases:
        engine = open_engine(case, rank=rank, size=size)
        gradients = _keep_gradients(engine)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        train_rank(engine, batches, num_rounds=num_rounds, num_steps=1)
        regions = engine._model.shard_map.regions
        parts = [
            (held.spec, held.tensor)
            for name, gradient in gradients.items()
            for held in slices_of_rows(regions[name], gradient)
        ]
        found.append((parts, copied_parts(engine)))
    return found


def _first_update_alone(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the gradients of the first update on one device, and the weights after it."""
    engine, weights = open_single(case)
    gradients = _keep_gradients(engine)
    train_single(engine, case, num_steps=1)
    return gradients, weights


def _require_close(found: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """Check that tensors differ by at most a share of their largest number."""
    assert found.keys() == expected.keys() and all("lora" in name for name in found)
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        assert float((found[name] - tensor).abs().max()) <= limit * largest, name


@pytest.mark.parametrize("size", [2, 4])
def test_l7_l8_gradients_over_ranks_are_those_of_one_device(cases: list[Case], size: int) -> None:
    """L7: data parallelism, tensor parallelism and Ulysses in fp32, 1e-5 of the largest number.
    L8: FSDP2 over a frozen bf16 base with the same micro-batches, 1e-6, as the update.
    """
    whole, half = cases[1], cases[4]
    ways = [{}, SPLIT, {"ulysses_sequence_parallel_size": 2}, {"fsdp_size": 2}]
    of_l7 = [replace(whole, optim=UNCLIPPED, config=config, max_sequences=2) for config in ways]
    of_l8 = replace(half, optim=UNCLIPPED, max_sequences=2)
    ranks = run_ranks(_first_update, size, [*of_l7, of_l8])
    alone = _first_update_alone(of_l7[0])
    for number in range(len(of_l7)):
        gradients = assembled(part for rank in ranks for part in rank[number][0])
        _require_close(gradients, alone[0], 1e-5)
    gradients, weights = (assembled(x for rank in ranks for x in rank[-1][i]) for i in (0, 1))
    expected = _first_update_alone(of_l8)
    _require_close(gradients, expected[0], 1e-6)
    _require_close(weights, expected[1], 1e-6)


def test_l7_gradients_do_not_depend_on_micro_batches(cases: list[Case]) -> None:
    """L7: of one sequence to the whole mini-batch, so that prompts are shared by other numbers."""
    whole = replace(cases[1], optim=UNCLIPPED, config={})
    expected, _ = _first_update_alone(replace(whole, max_sequences=15))
    for max_sequences in (1, 2, 4, 7):
        gradients, _ = _first_update_alone(replace(whole, max_sequences=max_sequences))
        _require_close(gradients, expected, 1e-5)


def test_l7_l8_two_ranks_train_what_one_device_trains(cases: list[Case], tmp_path: Path) -> None:
    """L7, L8: five steps, over a base in fp32 and in bf16."""
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


def test_l9_one_device_continues_what_two_ranks_began(cases: list[Case], tmp_path: Path) -> None:
    """L9: weights and moments of the optimizer are those of the ranks, bit for bit."""
    case = replace(cases[1], config={})
    ranks = run_ranks(_begin, 2, case, tmp_path)
    begun = assembled(part for rank in ranks for part in rank.parts)
    ways: list[dict[str, Tensor]] = []
    for number in range(2):
        engine, weights = open_single(case)
        engine.load(tmp_path)
        assert all(torch.equal(begun[name], weights[name]) for name in begun)
        if number:  # through a checkpoint of this device
            (tmp_path / "again").mkdir()
            engine.save(tmp_path / "again")
            engine, weights = open_single(case)
            engine.load(tmp_path / "again")
        train_single(engine, case, num_steps=2)
        ways.append(weights)
    assert all(torch.equal(ways[0][name], ways[1][name]) for name in begun)
    engine, weights = open_single(case)
    train_single(engine, case, num_steps=3)
    for name, expected in weights.items():
        assert float((ways[0][name] - expected).abs().max()) < 1e-5, name


def _begin(rank: int, size: int, store_port: int, case: Case, folder: Path) -> Outcome:
    """Train one step and save it."""
    engine = open_engine(case, rank=rank, size=size)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    outcome = train_rank(engine, batches, num_rounds=num_rounds, num_steps=1)
    engine.save(folder)
    return outcome


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
    """L9: from a checkpoint of one device."""
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
