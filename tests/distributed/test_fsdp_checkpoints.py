# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of some ranks continue on any other number of them, and in one process."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tandem.config.schema.optim import OptimConfig
from tandem.engines.checkpoint import OPTIMIZER_FILE, SHARDED_FILE
from tandem.engines.sharded_checkpoint import export_sharded
from tandem.errors import UserError
from tandem.models.folder import check_folder, open_part
from tandem.models.parallel import WHOLE
from tandem.types import SliceSpec
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
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
from tests.unit.models.test_hf import OTHERS
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf

OPTIM = OptimConfig(
    optimizer="Muon", lr=2e-4, muon_lr=1e-4, lr_scheduler_type="cosine", min_lr_ratio=0.1
)
TOLERANCE = 1e-4
SPLIT = {"tensor_model_parallel_size": 2}
STAGES = {"pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Visit:
    """A visit of some ranks to a checkpoint: the folder to load, layout, folder to write."""

    source: Path
    target: Path
    config: dict[str, int]


@dataclass(frozen=True)
class Resumed:
    """The parts of one rank, as loaded and after two more steps."""

    loaded: list[tuple[SliceSpec, Tensor]]
    outcome: Outcome


@pytest.fixture
def case(tmp_path: Path) -> Case:
    write_hf(NATIVE["qwen2_tied"](), tmp_path / "model")
    (tmp_path / "model" / "tokenizer_config.json").write_text("{}")
    return Case(tmp_path / "model", OPTIM)


def _start(rank: int, size: int, store_port: int, case: Case, saved: Path) -> Resumed:
    """Train two steps, save, and train two more."""
    engine = open_engine(case, rank=rank, size=size)
    batches, num_rounds = deal(case, engine, rank=rank, size=size)
    train_rank(engine, batches, num_rounds=num_rounds, num_steps=2, loss=case.loss)
    engine.save(saved)
    before = copied_parts(engine)
    after = train_rank(engine, batches, num_rounds=num_rounds, num_steps=2, loss=case.loss)
    return Resumed(before, after)


def _resume(
    rank: int, size: int, store_port: int, case: Case, visits: Sequence[Visit]
) -> list[Resumed]:
    resumed = []
    for visit in visits:
        case = replace(case, config=visit.config)
        engine = open_engine(case, rank=rank, size=size)
        engine.load(visit.source)
        engine.save(visit.target)
        loaded = copied_parts(engine)
        batches, num_rounds = deal(case, engine, rank=rank, size=size)
        outcome = train_rank(engine, batches, num_rounds=num_rounds, num_steps=2, loss=case.loss)
        resumed.append(Resumed(loaded, outcome))
    return resumed


def _wholes(ranks: Sequence[Resumed]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the loaded weights, and the weights after two more steps."""
    loaded = assembled(part for rank in ranks for part in rank.loaded)
    return loaded, assembled(part for rank in ranks for part in rank.outcome.parts)


def _check_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor), name


def _check_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("is_critic", [False, True])
def test_two_ranks_continue_as_one_and_as_four(case: Case, tmp_path: Path, is_critic: bool) -> None:
    case = replace(case, is_critic=is_critic)
    saved, single, *targets = (tmp_path / str(i) for i in range(7))
    for folder in (saved, single, *targets):
        folder.mkdir()
    saved_weights, final = _wholes(run_ranks(_start, 2, case, saved))

    engine, weights = open_single(case)
    engine.load(saved)
    _check_equal(weights, saved_weights)
    engine.save(single)
    assert (single / OPTIMIZER_FILE).exists() and not (single / SHARDED_FILE).exists()
    train_single(engine, case, num_steps=2)
    _check_close(weights, final)

    visits = [
        Visit(saved, targets[0], {}),
        Visit(single, targets[1], {"fsdp_size": 2}),
        Visit(saved, targets[2], {**SPLIT, "fsdp_size": 1}),
        Visit(single, targets[3], STAGES),
        Visit(targets[3], targets[4], {}),
    ]
    for size, some in ((1, visits[:1]), (4, visits)):
        by_rank = run_ranks(_resume, size, case, some)
        for visit, *ranks in zip(some, *by_rank, strict=True):
            loaded, continued = _wholes(ranks)
            _check_equal(loaded, saved_weights)
            _check_close(continued, final)
            again, weights = open_single(case)
            again.load(visit.target)
            _check_equal(weights, saved_weights)
            train_single(again, case, num_steps=2)
            _check_close(weights, final)


def test_mo13_experts_of_two_ranks_continue_on_four_and_in_one(tmp_path: Path) -> None:
    """Save with experts over two ranks; load with experts over four, with FSDP2, and whole. On as
    many ranks as before, the weights after two more steps are the same bit by bit.
    """
    write_hf(EXPERTS["dots1"](), tmp_path / "model")
    divided = {"expert_model_parallel_size": 2}
    case = Case(tmp_path / "model", OPTIM, config=divided)
    saved, same, *targets = (tmp_path / str(i) for i in range(5))
    for folder in (saved, same, *targets):
        folder.mkdir()
    saved_weights, final = _wholes(run_ranks(_start, 2, case, saved))
    (two,) = zip(*run_ranks(_resume, 2, case, [Visit(saved, same, divided)]), strict=True)
    loaded, continued = _wholes(two)
    _check_equal(loaded, saved_weights)
    _check_equal(continued, final)
    engine, weights = open_single(replace(case, config={}))
    engine.load(saved)
    _check_equal(weights, saved_weights)
    train_single(engine, case, num_steps=2)
    _check_close(weights, final)
    layouts = ({"expert_model_parallel_size": 4}, {"fsdp_size": 2}, {**SPLIT, **divided})
    visits = [Visit(saved, target, own) for target, own in zip(targets, layouts, strict=True)]
    by_rank = run_ranks(_resume, 4, case, visits)
    for visit, *ranks in zip(visits, *by_rank, strict=True):
        loaded, continued = _wholes(ranks)
        _check_equal(loaded, saved_weights)
        _check_close(continued, final)
        again, weights = open_single(replace(case, config={}))
        again.load(visit.target)
        _check_equal(weights, saved_weights)


def test_a_model_of_transformers_continues_on_two_ranks_and_in_one(tmp_path: Path) -> None:
    write_hf(OTHERS["phi"](), tmp_path / "model")
    case = Case(tmp_path / "model", OptimConfig(lr=2e-4))
    saved, single, exported, *targets = (tmp_path / str(i) for i in range(5))
    for folder in (saved, single, *targets):
        folder.mkdir()
    saved_weights, final = _wholes(run_ranks(_start, 2, case, saved))
    export_sharded(saved, exported)
    model = open_part(check_folder(str(exported)), WHOLE, dtype=torch.float32, device="cpu")
    _check_equal({name: x.detach() for name, x in model.module.named_parameters()}, saved_weights)
    engine, weights = open_single(case)
    engine.load(saved)
    _check_equal(weights, saved_weights)
    engine.save(single)
    train_single(engine, case, num_steps=2)
    _check_close(weights, final)
    visits = [Visit(saved, targets[0], {}), Visit(single, targets[1], {})]
    for ranks in zip(*run_ranks(_resume, 2, case, visits), strict=True):
        loaded, continued = _wholes(ranks)
        _check_equal(loaded, saved_weights)
        _check_close(continued, final)


@pytest.mark.parametrize("is_critic", [False, True])
def test_exports_are_the_trained_weights(case: Case, tmp_path: Path, is_critic: bool) -> None:
    case = replace(case, is_critic=is_critic)
    for number, config in enumerate(({}, SPLIT, STAGES)):
        saved, exported = (tmp_path / f"{number} {name}" for name in "ab")
        saved.mkdir()
        ranks = run_ranks(_start, 2, replace(case, config=config), saved)
        weights, _ = _wholes(ranks)
        export_sharded(saved, exported)
        found = replace(case, folder=exported).model
        assert found.value_head_seed is None, "its head is the trained one"
        model = open_part(found, WHOLE, dtype=torch.float32, device="cpu")
        _check_equal(dict(model.module.named_parameters()), weights)
        assert (exported / "tokenizer_config.json").read_text() == "{}"


def _load_in_vain(rank: int, size: int, store_port: int, case: Case, folder: Path) -> str:
    engine = open_engine(case, rank=rank, size=size)
    with pytest.raises(UserError) as refusal:
        engine.load(folder)
    return str(refusal.value)


def test_a_foreign_checkpoint_is_refused_by_every_rank(case: Case, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    write_hf(NATIVE["llama"](), tmp_path / "other")
    other, _ = open_single(replace(case, folder=tmp_path / "other"))
    other.save(tmp_path / "saved")
    for message in run_ranks(_load_in_vain, 2, case, tmp_path / "saved"):
        assert "another model" in message
    engine, _ = open_single(case)
    engine.save(tmp_path / "saved")
    adamw = replace(case, optim=OptimConfig(lr=1e-3))
    for message in run_ranks(_load_in_vain, 2, adamw, tmp_path / "saved"):
        assert "optim.optimizer='AdamW'" in message


def _save_apart(rank: int, size: int, store_port: int, case: Case, folder: Path) -> str:
    """Save into a folder that one of the ranks does not find."""
    engine = open_engine(case, rank=rank, size=size)
    with pytest.raises(OSError, match="that all nodes share") as failure:
        engine.save(folder / "elsewhere" if rank else folder)
    return str(failure.value)


def test_a_folder_that_a_rank_does_not_find_is_an_error_on_all(case: Case, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (message,) = set(run_ranks(_save_apart, 2, case, tmp_path / "saved"))
    assert str(tmp_path / "saved" / "elsewhere") in message
    assert not list((tmp_path / "saved").iterdir())


def _save_in_vain(rank: int, size: int, store_port: int, case: Case, folder: Path) -> str:
    """Save while one of the ranks may write only a few bytes."""
    engine = open_engine(case, rank=rank, size=size)
    if rank == 1:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    with pytest.raises(OSError, match="cannot write") as failure:
        engine.save(folder)
    return str(failure.value)


def test_a_disk_that_is_full_on_one_rank_is_an_error_on_all(case: Case, tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    assert len(set(run_ranks(_save_in_vain, 2, case, tmp_path / "saved"))) == 1
    assert not (tmp_path / "saved" / SHARDED_FILE).exists()
