# SPDX-License-Identifier: Apache-2.0
"""Damage in any file of a real checkpoint, of one process or of two ranks, is found and named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.optim import OptimConfig
from tests.distributed.spawn import run_ranks
from tests.distributed.training import Case, deal, open_engine, train_rank
from tests.fakes.damage import check_random_damage
from tests.unit.models.tiny_models import NATIVE, write_hf


def _train_and_save(rank: int, size: int, store_port: int, case: Case, saved: Path) -> None:
    engine = open_engine(case, rank=rank, size=size)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    train_rank(engine, batches, num_rounds=num_rounds, num_steps=1, loss=case.loss)
    engine.save(saved)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_random_damage_is_found_and_named(num_ranks: int, tmp_path: Path) -> None:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    case = Case(tmp_path / "model", OptimConfig(lr=2e-4))
    with CheckpointStore(tmp_path / "run").writing(1, {"step": 1}) as folder:
        (folder / "actor").mkdir()
        run_ranks(_train_and_save, num_ranks, case, folder / "actor")
    check_random_damage(tmp_path / "run" / "global_step_1", num_trials=200)
