# SPDX-License-Identifier: Apache-2.0
"""Options that save memory, over several ranks: recomputing parts of layers, moments in bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tandem.config.schema.optim import OptimConfig
from tandem.engines.fsdp import FsdpEngine
from tandem.models.decoder import Granularity
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    TOTAL_STEPS,
    Case,
    Outcome,
    assembled,
    deal,
    open_engine,
    open_sharded_model,
    open_single,
    train_rank,
    train_single,
)
from tests.unit.models.tiny_models import NATIVE, write_hf

OPTIM = OptimConfig(lr=2e-4, clip_grad=0.5)
LAYOUTS = ({}, {"tensor_model_parallel_size": 2}, {"ulysses_sequence_parallel_size": 2})
GRANULARITIES: tuple[Granularity, ...] = ("pointwise", "feed_forward", "full")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    write_hf(NATIVE["qwen3_biases"](), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return Case(tmp_path / "model", OPTIM)


def _recompute(rank: int, size: int, store_port: int, cases: Sequence[Case]) -> list[list[Outcome]]:
    """Take two steps in each layout, first without recomputation."""
    found = []
    for case in cases:
        outcomes = []
        for granularity in (None, *GRANULARITIES):
            model = open_sharded_model(case, rank=rank, size=size)
            model.language_model.set_gradient_checkpointing(
                granularity is not None, granularity or "full"
            )
            engine = FsdpEngine(model, case.optim, total_training_steps=TOTAL_STEPS)
            batches, num_rounds = deal(case, engine, rank=rank, size=size)
            outcomes.append(train_rank(engine, batches, num_rounds=num_rounds, num_steps=2))
        found.append(outcomes)
    return found


def test_what_is_recomputed_changes_nothing(case: Case) -> None:
    cases = [replace(case, config=layout) for layout in LAYOUTS]
    for rank in run_ranks(_recompute, 2, cases):
        for kept, *recomputed in rank:
            for outcome in recomputed:
                assert outcome.reports == kept.reports
                for (spec, part), (_, expected) in zip(outcome.parts, kept.parts, strict=True):
                    assert torch.equal(part, expected), spec


def _halve(
    rank: int, size: int, store_port: int, cases: Sequence[Case], folders: Sequence[Path]
) -> list[tuple[Outcome, Outcome]]:
    """Take two steps, save, and take two more, once directly and once resumed."""
    found = []
    for case, folder in zip(cases, folders, strict=True):
        engine = open_engine(case, rank=rank, size=size)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        train_rank(engine, batches, num_rounds=num_rounds, num_steps=2)
        engine.save(folder)
        resumed = open_engine(case, rank=rank, size=size)
        resumed.load(folder)
        first, second = (
            train_rank(one, batches, num_rounds=num_rounds, num_steps=2)
            for one in (engine, resumed)
        )
        found.append((first, second))
    return found


def test_half_moments_are_sharded_and_resumed_bit_by_bit(case: Case, tmp_path: Path) -> None:
    """Check that ranks with the same parts round alike, as ``assembled`` asserts."""
    halved = replace(case, optim=OPTIM.model_copy(update={"moments_dtype": "bfloat16"}))
    layouts = ({}, {"fsdp_size": 1}, {"tensor_model_parallel_size": 2})
    cases = [replace(halved, config=layout) for layout in layouts]
    folders = [tmp_path / str(number) for number in range(len(cases))]
    for folder in folders:
        folder.mkdir()
    by_rank = run_ranks(_halve, 2, cases, folders)
    engine, expected = open_single(case)
    train_single(engine, case, num_steps=4)
    for ranks in zip(*by_rank, strict=True):
        trained, resumed = (
            assembled(part for rank in ranks for part in rank[number].parts) for number in (0, 1)
        )
        for name, weight in trained.items():
            assert torch.equal(resumed[name], weight), name
            # Four steps of 2e-4, of which a moment's rounding may be wrong by a hundredth.
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=4 * 2e-4 * 0.02)
