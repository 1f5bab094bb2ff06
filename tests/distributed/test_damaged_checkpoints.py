# SPDX-License-Identifier: Apache-2.0
"""Damage in any file of a real checkpoint is found and named, and the checkpoint is not loaded: of
all weights, of adapters and of experts, written by one process or by two ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.optim import OptimConfig
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    Case,
    deal,
    open_engine,
    open_single,
    train_rank,
    train_single,
)
from tests.fakes.damage import check_random_damage
from tests.fakes.tiny_adapters import ALL
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf

OPTIM = OptimConfig(lr=2e-4)
NAMES = ("weights", "adapters", "experts")


def _train_and_save(
    rank: int, size: int, store_port: int, cases: Mapping[str, Case], root: Path
) -> None:
    for name, case in cases.items():
        engine = open_engine(case, rank=rank, size=size)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        train_rank(engine, batches, num_rounds=num_rounds, num_steps=1, loss=case.loss)
        engine.save(root / name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one process and of two, each with a checkpoint of step 1."""
    root = tmp_path_factory.mktemp("runs")
    for name, hf_config in (("dense", NATIVE["qwen2_tied"]), ("experts", EXPERTS["dots1"])):
        write_hf(hf_config(), root / name)
        (root / name / "tokenizer_config.json").write_text("{}")
    cases = {
        "weights": Case(root / "dense", OPTIM),
        "adapters": Case(root / "dense", OPTIM, adapters=ALL),
        "experts": Case(root / "experts", OPTIM),
    }
    divided = {"expert_model_parallel_size": 2}
    run_ranks(
        _train_and_save,
        2,
        cases | {"experts": Case(root / "experts", OPTIM, config=divided)},
        _folders(root / "parts"),
    )
    for name, case in cases.items():
        engine, _ = open_single(case)
        train_single(engine, case, num_steps=1)
        engine.save(_folders(root / "saved") / name)
    for name in NAMES:
        for kind, saved in (("one", root / "saved" / name), ("two", root / "parts" / name)):
            with CheckpointStore(root / f"{name}_{kind}").writing(1, {"step": 1}) as folder:
                saved.rename(folder / "actor")
    return root


def _folders(root: Path) -> Path:
    """Make a folder for each kind of checkpoint."""
    for name in NAMES:
        (root / name).mkdir(parents=True, exist_ok=True)
    return root


@pytest.mark.parametrize("kind", ["one", "two"])
@pytest.mark.parametrize("name", NAMES)
def test_random_damage_is_found_and_named(name: str, kind: str, runs: Path) -> None:
    folder = runs / f"{name}_{kind}" / "global_step_1"
    check_random_damage(folder, num_trials=200)
    marks = {
        "optimizer.pt": kind == "one",
        "sharded.json": kind == "two",
        "adapter_model.safetensors": name == "adapters",
        "model.safetensors": kind == "one" and name != "adapters",
    }
    assert {mark: (folder / "actor" / mark).is_file() for mark in marks} == marks
