# SPDX-License-Identifier: Apache-2.0
"""Training on two GPUs over NCCL, with all ways of dividing a model, against one GPU in fp32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")
pytest.importorskip("pydantic", reason="the engine's configuration needs pydantic")

from tandem.config.schema.optim import OptimConfig
from tests.distributed.spawn import run_ranks
from tests.distributed.training import (
    Case,
    Outcome,
    assembled,
    open_single,
    train_all,
    train_single,
)
from tests.unit.models.tiny_models import EXPERTS, NATIVE, write_hf

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

ADAMW = OptimConfig(lr=2e-4, lr_warmup_steps=2, clip_grad=0.5)
OFFLOADED = {"param_offload": True, "optimizer_offload": True}
TENSOR, SEQUENCE = ({f"{x}_parallel_size": 2} for x in ("tensor_model", "ulysses_sequence"))
EXPERT, STAGES = ({f"{x}_model_parallel_size": 2} for x in ("expert", "pipeline"))
DENSE: Sequence[dict[str, Any]] = [
    {},
    {"reshard_after_forward": False},
    OFFLOADED,
    {"offload_policy": True},
    TENSOR,
    SEQUENCE,
    STAGES,
    {"fsdp_size": 1},
]
SPARSE: Sequence[dict[str, Any]] = [
    {},
    EXPERT,
    {**EXPERT, **OFFLOADED},
    {**EXPERT, "reshard_after_forward": False},
    {**EXPERT, **TENSOR},
    {**EXPERT, **SEQUENCE},
]
BALANCE = "actor/experts/max_over_mean"


@pytest.mark.parametrize(
    ("family", "divided"),
    [("qwen2_untied", DENSE), ("qwen3_moe", SPARSE), ("deepseek_v3", SPARSE)],
)
def test_two_devices_train_as_one(
    tmp_path: Path, family: str, divided: Sequence[dict[str, Any]]
) -> None:
    write_hf((NATIVE | EXPERTS)[family](), tmp_path)
    case = Case(tmp_path, ADAMW, platform="cuda")
    cases = [replace(case, config=config) for config in divided]
    for one, *ranks in zip(
        cases, *run_ranks(train_all, 2, cases, backend="cpu:gloo,cuda:nccl"), strict=True
    ):
        _compare(one, ranks)


def _compare(case: Case, ranks: Sequence[Outcome]) -> None:
    """Compare with the engine of one device, which computes with the same kernels.

    Sums in another order differ in their last bits. AdamW can make of that a whole step of a weight
    whose gradient is about zero, which the mean over all weights bounds.
    """
    engine, weights = open_single(case)
    reports, scores = train_single(engine, case)
    assert ranks[0].reports == ranks[1].reports
    for actual, expected in zip(ranks[0].reports, reports, strict=True):
        assert actual.grad_norm == pytest.approx(expected.grad_norm, rel=1e-3), case.config
        assert not actual.skipped
        compared = {name: x for name, x in expected.metrics.items() if name != BALANCE}
        found = {name: actual.metrics[name] for name in compared}
        assert found == pytest.approx(compared, rel=1e-3, abs=1e-4), case.config
    found = assembled(part for rank in ranks for part in rank.parts)
    differences = torch.cat([(found[x] - w.cpu()).abs().flatten() for x, w in weights.items()])
    assert float(differences.mean()) < 1e-6, case.config
    log_probs = _log_probs(case, ranks)
    expected = torch.cat([x.score_R.cpu() for x in scores])
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-3)


def _log_probs(case: Case, ranks: Sequence[Outcome]) -> Tensor:
    """Return those of all micro-batches in order; the last rank has them if ranks share batches."""
    shared = {*TENSOR, *SEQUENCE, *STAGES}
    if shared & case.config.keys():
        return torch.cat(ranks[-1].log_probs)
    batches = max(len(rank.log_probs) for rank in ranks)
    dealt = [rank.log_probs[i] for i in range(batches) for rank in ranks if i < len(rank.log_probs)]
    return torch.cat(dealt)
