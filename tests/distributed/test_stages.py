# SPDX-License-Identifier: Apache-2.0
"""MO11: stages of layers train what one process trains, with every other way of dividing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.config.schema.optim import OptimConfig
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    Case,
    assembled,
    check_outcomes,
    open_single,
    train_all,
    train_single,
)
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
