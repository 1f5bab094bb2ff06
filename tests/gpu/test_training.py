# SPDX-License-Identifier: Apache-2.0
"""Loss and gradients of the training engine with fused operators: against a reference in fp64 with
torch's, and against themselves with prompts shared or repeated, other micro-batches, and layers
recomputed.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="the kernels need triton")
pytest.importorskip("pydantic", reason="the engine's configuration needs pydantic")

from tandem.config.schema.optim import OptimConfig
from tandem.data.packing import TrainSequence, pack_microbatches, plan_microbatches
from tandem.engines.single import SingleDeviceEngine
from tandem.models.decoder import Granularity
from tandem.models.operators import TORCH
from tandem.types import LossColumns, LossScale, PackedBatch
from tests.fakes.losses import WITH_ALL_TERMS, changed
from tests.gpu.machine import Machine, Shape, make_pair, open_ours

# Nothing is clipped: where clipping begins the gradient jumps, and rounding decides who jumps.
LOSS = changed(WITH_ALL_TERMS, clip_ratio_low=0.999, clip_ratio_high=1e3, clip_ratio_c=1e4)
TEMPERATURE = 0.9
SHAPES = {
    "qwen2": Shape("qwen2", 64, 2, 7, vocabulary=3001),
    "qwen3": Shape("qwen3", 128, 1, 4, vocabulary=3001),
    "llama": Shape("llama", 64, 4, 1, vocabulary=3001),
}
HALF = {"whole": 0.03, "loss": 5e-3}
"""Bounds on relative differences: products of bf16 keep eight bits, gradients add up many."""
FULL = {"whole": 1e-4, "loss": 1e-5}


@dataclass(frozen=True)
class Computed:
    """What an update would step with: loss, metrics, and gradients in fp32 or fp64."""

    loss: float
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@dataclass(frozen=True)
class How:
    """``shares_prompts``: samples of a prompt have one segment of it."""

    dtype: torch.dtype
    shares_prompts: bool = True
    max_tokens: int | None = None
    recomputes: Granularity | None = None
    is_reference: bool = False


def sequences_of(machine: Machine, *, shares_prompts: bool) -> list[TrainSequence]:
    """Groups of four; prompts and responses of many lengths."""
    rng = random.Random(2)
    num_groups, longest = (2, 9) if machine.trial else (8, 150)

    def draw() -> tuple[int, ...]:
        return tuple(rng.randrange(3, 80) for _ in range(rng.randint(1, longest)))

    prompts = [draw() for _ in range(num_groups)]
    return [
        TrainSequence(i // 4 if shares_prompts else i, prompts[i // 4], draw())
        for i in range(4 * num_groups)
    ]


def batches_of(sequences: list[TrainSequence], max_tokens: int | None) -> list[PackedBatch]:
    """Packed with columns that are the same however they are cut."""
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    generator = torch.Generator().manual_seed(1)
    columns = LossColumns(
        advantages_R=torch.randn(num_tokens, generator=generator),
        old_logp_R=-8 + 0.1 * torch.randn(num_tokens, generator=generator),
        ref_logp_R=-8 + 0.1 * torch.randn(num_tokens, generator=generator),
    )
    plan = plan_microbatches(sequences, max_tokens=max_tokens)
    return pack_microbatches(sequences, plan, columns=columns)


def compute(folder: Path, machine: Machine, how: How) -> Computed:
    """Everything of an update up to the optimizer's step."""
    kept = torch.float64 if how.is_reference else torch.float32
    operators = {"operators": TORCH} if how.is_reference else {}
    model = open_ours(folder, machine, dtype=kept, **operators)
    computes = model if how.is_reference else model.in_dtype(how.dtype)
    computes.set_gradient_checkpointing(how.recomputes is not None, how.recomputes or "full")
    engine = SingleDeviceEngine(model, OptimConfig(), total_training_steps=10, compute=computes)
    sequences = sequences_of(machine, shares_prompts=how.shares_prompts)
    num_tokens = sum(sequence.num_loss_tokens for sequence in sequences)
    totals = engine._accumulate(
        batches_of(sequences, how.max_tokens),
        LOSS,
        scale=LossScale(num_tokens=num_tokens, num_sequences=len(sequences)),
        temperature=TEMPERATURE,
    )
    metrics = {name: float(value) for name, value in totals.metrics.items()}
    return Computed(float(totals.loss), metrics, engine._gradients())


def check_close(actual: Computed, expected: Computed, *, whole: float, loss: float) -> None:
    """Loss, metrics, the gradient as a whole, and with four times the bound each of its parts.

    A part counts with at least a thousandth of the whole: some gradients are zero but for rounding.
    """
    assert actual.loss == pytest.approx(expected.loss, rel=loss, abs=loss)
    assert actual.metrics == pytest.approx(expected.metrics, rel=4 * loss, abs=4 * loss)
    norms = {name: float(grad.double().norm()) for name, grad in expected.gradients.items()}
    norm = sum(value**2 for value in norms.values()) ** 0.5
    differences = {
        name: float((actual.gradients[name].double() - grad.double()).norm())
        for name, grad in expected.gradients.items()
    }
    for name, difference in differences.items():
        bound = 4 * whole * max(norms[name], 1e-3 * norm)
        assert difference <= bound, f"{name}: {difference / norms[name]} of its norm"
    total = sum(value**2 for value in differences.values()) ** 0.5
    assert total <= whole * norm, f"{total / norm} of the gradient's norm"


def bounds(dtype: torch.dtype) -> dict[str, float]:
    """Of ``check_close``."""
    return HALF if dtype == torch.bfloat16 else FULL


def dtypes(machine: Machine) -> tuple[torch.dtype, ...]:
    """A CPU has no flash attention in bf16."""
    return (torch.float32,) if machine.trial else (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("family", SHAPES)
def test_loss_and_gradients_equal_the_reference(
    family: str, machine: Machine, tmp_path: Path
) -> None:
    make_pair(SHAPES[family], machine, tmp_path)
    expected = compute(tmp_path, machine, How(torch.float64, is_reference=True))
    assert expected.metrics and all(bool(g.any()) for g in expected.gradients.values())
    for dtype in dtypes(machine):
        check_close(compute(tmp_path, machine, How(dtype)), expected, **bounds(dtype))


@pytest.mark.parametrize(
    "change",
    [
        {"shares_prompts": False},
        {"max_tokens": 0},
        {"recomputes": "full"},
        {"recomputes": "feed_forward"},
        {"recomputes": "pointwise"},
    ],
    ids=["prompts_repeated", "small_micro_batches", "layers", "feed_forwards", "pointwise"],
)
def test_what_must_not_matter(change: dict, machine: Machine, tmp_path: Path) -> None:
    make_pair(SHAPES["qwen2"], machine, tmp_path)
    if "max_tokens" in change:
        change = {"max_tokens": 30 if machine.trial else 700}
        sequences = sequences_of(machine, shares_prompts=True)
        assert len(plan_microbatches(sequences, **change)) > (1 if machine.trial else 3)
    for dtype in dtypes(machine):
        how = How(dtype)
        expected = compute(tmp_path, machine, how)
        changed = compute(tmp_path, machine, replace(how, **change))
        check_close(changed, expected, **bounds(dtype))
