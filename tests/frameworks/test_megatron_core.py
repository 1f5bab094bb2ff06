# SPDX-License-Identifier: Apache-2.0
"""MO17: the layers of megatron-core train what tandem's own layers train, on a double of CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema.optim import OptimConfig
from tests.distributed.spawn import run_ranks
from tests.distributed.training import Case, Outcome, check_outcomes, train_all
from tests.fakes import cuda_double
from tests.unit.models.tiny_models import NATIVE, write_hf

pytest.importorskip("megatron.core", reason="needs megatron-core: make test-frameworks")

ADAMW = OptimConfig(lr=2e-4, lr_warmup_steps=2, clip_grad=0.5)
MUON = OptimConfig(optimizer="Muon", lr=2e-4, muon_lr=1e-4)


def _train_all(rank: int, size: int, store_port: int, cases: Sequence[Case]) -> list[Outcome]:
    cuda_double.install()
    return train_all(rank, size, store_port, cases)


def _layout(**sizes: Any) -> dict[str, Any]:
    return {"backend": "mcore", **sizes}


def test_mo17_megatrons_layers_train_what_tandems_do(tmp_path: Path) -> None:
    """Tensor parallelism, stages, and FSDP2 around Megatron's layers. A process has one set of
    Megatron's groups, so that each size of tensor parallelism has processes of its own.
    """
    for family in ("qwen2_tied", "qwen3_tied", "llama"):
        write_hf(NATIVE[family](), tmp_path / family)
    qwen2, qwen3, llama = (
        Case(tmp_path / family, ADAMW) for family in ("qwen2_tied", "qwen3_tied", "llama")
    )
    whole = [
        replace(qwen2, config=_layout()),
        replace(qwen3, config=_layout(pipeline_model_parallel_size=2), recompute=True),
        replace(llama, config=_layout(fsdp_size=1), optim=MUON),
    ]
    split = [
        replace(model, config=_layout(tensor_model_parallel_size=2))
        for model in (qwen2, qwen3, replace(llama, optim=MUON))
    ]
    both = [
        replace(qwen3, config=_layout(tensor_model_parallel_size=2, pipeline_model_parallel_size=2))
    ]
    for size, cases in ((2, whole), (2, split), (4, both)):
        by_rank = run_ranks(_train_all, size, cases)
        for case, *ranks in zip(cases, *by_rank, strict=True):
            check_outcomes(case, ranks)
