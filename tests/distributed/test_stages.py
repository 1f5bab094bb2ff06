# SPDX-License-Identifier: Apache-2.0
"""MO11: stages of layers train what one process trains, with every other way of dividing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.config.schema.optim import OptimConfig
from tandem.types import SliceSpec, UpdateReport
from tandem.workers.parts import changing_slices
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    Case,
    assembled,
    check_outcomes,
    open_engine,
    open_sharded_model,
    open_single,
    train_all,
    train_single,
)
from tests.unit.engines.minibatch import LOSS, SCALE
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf

ADAMW = OptimConfig(lr=2e-4, lr_warmup_steps=2, clip_grad=0.5)
MUON = OptimConfig(optimizer="Muon", lr=2e-4, muon_lr=1e-4)
UNCLIPPED = OptimConfig(lr=2e-4, clip_grad=1e9)


def staged(number: int = 2, **others: Any) -> dict[str, Any]:
    return {"pipeline_model_parallel_size": number, **others}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return tiny random models by name, of four layers each. Do not write into them."""
    root = tmp_path_factory.mktemp("models")
    for name, families in (
        ("qwen2_tied", NATIVE),
        ("qwen2_untied", NATIVE),
        ("qwen3_biases", NATIVE),
        ("qwen3_moe", EXPERTS),
        ("dots1", EXPERTS),
        ("deepseek_v3", EXPERTS),
    ):
        config = families[name]()
        config.num_hidden_layers, config.layer_types = 4, ["full_attention"] * 4
        write_hf(config, root / name)
    return {folder.name: folder for folder in root.iterdir()}


def test_mo11_two_stages(folders: dict[str, Path]) -> None:
    """Micro-batches have different lengths. A stage alone adds up what one process adds up."""
    tied, untied, qwen3, experts = (
        Case(folders[name], ADAMW)
        for name in ("qwen2_tied", "qwen2_untied", "qwen3_biases", "qwen3_moe")
    )
    exact = replace(untied, optim=UNCLIPPED, config=staged(), max_sequences=1)
    cases = [
        exact,
        replace(tied, config=staged(), max_sequences=1),
        replace(qwen3, config=staged(num_layers_in_first_pipeline_stage=3), recompute=True),
        replace(untied, config=staged(param_offload=True, optimizer_offload=True), optim=MUON),
        replace(tied, config=staged(), optim=MUON),
        replace(experts, config=staged()),
        replace(tied, config=staged(), is_critic=True),
    ]
    by_rank = run_ranks(train_all, 2, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)
    engine, expected = open_single(exact)
    train_single(engine, exact)
    found = assembled(part for rank in by_rank for part in rank[0].parts)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_mo11_stages_over_four_ranks(folders: dict[str, Path]) -> None:
    """With six sequences in a micro-batch there are three for two ranks of a stage."""
    names = ("qwen2_tied", "qwen3_biases", "qwen3_moe", "dots1", "deepseek_v3")
    tied, qwen3, experts, dots, latent = (Case(folders[name], ADAMW) for name in names)
    cases = [
        replace(tied, config=staged(4), max_sequences=1),
        replace(tied, config=staged(), max_sequences=6),
        replace(tied, config=staged(fsdp_size=1), optim=MUON),
        replace(qwen3, config=staged(tensor_model_parallel_size=2), recompute=True),
        replace(tied, config=staged(ulysses_sequence_parallel_size=2)),
        replace(experts, config=staged(expert_model_parallel_size=2), max_sequences=6),
        replace(dots, config=staged(expert_model_parallel_size=2, tensor_model_parallel_size=2)),
        replace(latent, config=staged(tensor_model_parallel_size=2)),
    ]
    by_rank = run_ranks(train_all, 4, cases)
    for case, *ranks in zip(cases, *by_rank, strict=True):
        check_outcomes(case, ranks)


def received_by(
    rank: int, size: int, store_port: int, case: Case
) -> list[tuple[SliceSpec, Tensor]]:
    """Return what the weight link fills in a stage of a model that only scores."""
    model = open_sharded_model(case, rank=rank, size=size, frozen=True)
    slices = changing_slices(model)()
    computing = dict(model.language_model.module.named_parameters())
    assert {held.spec.name for held in slices} == computing.keys()
    return [(held.spec, held.tensor.clone()) for held in slices]


def test_mo11_the_last_stage_of_a_scorer_receives_a_tied_head(folders: dict[str, Path]) -> None:
    case = Case(folders["qwen2_tied"], ADAMW, config=staged())
    first, last = run_ranks(received_by, 2, case)
    embeddings = [
        [tensor for spec, tensor in stage if spec.name == "embedding.weight"]
        for stage in (first, last)
    ]
    assert torch.equal(torch.cat(embeddings[0]), torch.cat(embeddings[1]))


def update_with_nothing(rank: int, size: int, store_port: int, case: Case) -> UpdateReport:
    """Take a step for a mini-batch of which no sequence is computed."""
    engine = open_engine(case, rank=rank, size=size)
    return engine.update([], LOSS, scale=SCALE, temperature=1.0, num_rounds=0)


def test_mo11_stages_with_a_tied_head_step_without_a_micro_batch(folders: dict[str, Path]) -> None:
    case = Case(folders["qwen2_tied"], ADAMW, config=staged())
    reports = run_ranks(update_with_nothing, 2, case, timeout_s=120.0)
    assert reports[0] == reports[1]
    assert reports[0].grad_norm == 0.0
