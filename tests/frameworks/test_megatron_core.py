# SPDX-License-Identifier: Apache-2.0
"""MO17: the layers of megatron-core train what tandem's own layers train, on a double of CUDA.

MO19: so they do where a stub of MindSpeed makes the double.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tandem.config.schema.optim import OptimConfig
from tandem.types import UpdateReport
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    Case,
    Outcome,
    check_gradients,
    check_outcomes,
    save_first_steps,
    train_all,
)
from tests.fakes import cuda_double
from tests.fakes.mindspeed_stub import write_mindspeed
from tests.unit.models.tiny_models import NATIVE, write_hf

# No test process imports Megatron: an adaptor must come first.
pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="needs megatron-core: make test-frameworks"
)

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


def _save_first_steps(
    rank: int, size: int, store_port: int, saved: Sequence[tuple[Case, Path]]
) -> list[UpdateReport]:
    cuda_double.install()
    return save_first_steps(rank, size, store_port, saved)


@pytest.mark.parametrize("size", ["", "tensor_model_parallel_size", "pipeline_model_parallel_size"])
def test_mo17_gradients_of_megatrons_layers_are_those_of_tandems(size: str, tmp_path: Path) -> None:
    """Both compute the same micro-batches; weights alone would not show a gradient's size."""
    write_hf(NATIVE["qwen3_tied"](), tmp_path / "model")
    (tmp_path / "saved").mkdir()
    config = _layout(**({size: 2} if size else {}))
    case = Case(tmp_path / "model", ADAMW, config=config)
    reports, _ = run_ranks(_save_first_steps, 2, [(case, tmp_path / "saved")])
    check_gradients(case, tmp_path / "saved", report=reports[0])


def _train_with_adaptor(
    rank: int, size: int, store_port: int, cases: Sequence[Case], folder: Path
) -> tuple[list[Outcome], list[tuple[Any, ...]]]:
    sys.path.insert(0, str(folder))
    sys.argv = ["worker", "--use-ascend-coc"]
    outcomes = train_all(rank, size, store_port, cases)
    assert sys.argv[1:] == ["--use-ascend-coc"]
    return outcomes, sys.modules["mindspeed.megatron_adaptor"].EVENTS


def test_mo19_mindspeed_is_imported_before_megatron_and_adapts_it(tmp_path: Path) -> None:
    """Its stub redirects torch.cuda as torch_npu does, and replaces a function of Megatron."""
    write_hf(NATIVE["qwen3_tied"](), tmp_path / "model")
    write_mindspeed(tmp_path / "packages")
    case = Case(tmp_path / "model", ADAMW, config=_layout(tensor_model_parallel_size=2))
    cases = [replace(case, megatron_adaptor="mindspeed")]
    by_rank = run_ranks(_train_with_adaptor, 2, cases, tmp_path / "packages")
    check_outcomes(case, [outcomes[0] for outcomes, _ in by_rank])
    for _, events in by_rank:
        name, arguments, imported = events[0]
        assert (name, arguments, imported) == ("import", ["worker"], [])
        assert events[1] == ("repatch", {"use_flash_attn": True})
        (_, sizes, settings) = events[2]
        assert sizes == (2,) and settings["expert_tensor_parallel_size"] == 1
        assert "context_parallel_size" not in settings and len(events) == 3
