# SPDX-License-Identifier: Apache-2.0
"""The critic's loss: against verl's formulas over padded rows, in double precision."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

from tandem.algorithms.value_loss import ValueLoss
from tandem.types import LossColumns, LossInputs, LossScale

LENGTHS = (3, 1, 6, 4)
REACH = 0.5
LONGEST = 8.0


def make_inputs() -> LossInputs:
    """Values that have moved by less and by more than ``REACH``, in double precision."""
    generator = torch.Generator().manual_seed(0)
    sequence_R = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))

    def draw() -> Tensor:
        return torch.randn(len(sequence_R), generator=generator, dtype=torch.float64)

    values_R, returns_R = draw(), draw()
    return LossInputs(
        score_R=(values_R + 2 * draw()).requires_grad_(),
        entropy_R=None,
        sequence_R=sequence_R,
        num_sequences=len(LENGTHS),
        columns=LossColumns(draw(), values_R=values_R, returns_R=returns_R),
        scale=LossScale(num_tokens=len(sequence_R), num_sequences=len(LENGTHS)),
    )


def padded(values_R: Tensor) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(list(values_R.split(LENGTHS)), batch_first=True)


def written_out(inputs: LossInputs, mode: str) -> tuple[Tensor, Tensor]:
    """Loss and clip fraction of ``compute_value_loss`` over padded rows and a mask."""
    columns = inputs.columns
    assert columns is not None and columns.values_R is not None and columns.returns_R is not None
    vpreds, values, returns = map(padded, (inputs.score_R, columns.values_R, columns.returns_R))
    mask = padded(torch.ones_like(columns.values_R))
    clipped = torch.max(torch.min(vpreds, values + REACH), values - REACH)
    first, second = (vpreds - returns) ** 2, (clipped - returns) ** 2
    loss_mat = torch.max(first, second) * mask
    per_sequence = loss_mat.sum(-1)
    loss = {
        "token-mean": loss_mat.sum() / mask.sum(),
        "seq-mean-token-sum": per_sequence.mean(),
        "seq-mean-token-mean": (per_sequence / mask.sum(-1)).mean(),
        "seq-mean-token-sum-norm": per_sequence.mean() / LONGEST,
    }[mode]
    return 0.5 * loss, ((second > first).double() * mask).sum() / mask.sum()


MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradient_are_those_of_the_formula(mode: str) -> None:
    inputs = make_inputs()
    loss = ValueLoss(cliprange_value=REACH, loss_agg_mode=mode, loss_scale_factor=LONGEST)
    outputs = pickle.loads(pickle.dumps(loss))(inputs)
    expected, clipped = written_out(inputs, mode)
    torch.testing.assert_close(outputs.loss, expected, rtol=0, atol=1e-12)
    (ours,) = torch.autograd.grad(outputs.loss, inputs.score_R)
    (theirs,) = torch.autograd.grad(expected, inputs.score_R)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert 0 < float(clipped) < 1
    assert float(outputs.metrics["critic/vf_clipfrac"]) == pytest.approx(float(clipped), abs=1e-6)
    mean = float(inputs.score_R.detach().mean())
    assert float(outputs.metrics["critic/vpred_mean"]) == pytest.approx(mean, abs=1e-6)
    assert torch.equal(outputs.metrics["critic/vf_loss"], outputs.loss)


def test_a_value_that_has_moved_far_enough_towards_its_return_gets_no_gradient() -> None:
    score_R = torch.tensor([0.6, 0.6, -0.6], requires_grad=True)
    inputs = LossInputs(
        score_R,
        entropy_R=None,
        sequence_R=torch.zeros(3, dtype=torch.int64),
        num_sequences=1,
        columns=LossColumns(
            torch.zeros(3), values_R=torch.zeros(3), returns_R=torch.tensor([1.0, 0.2, 1.0])
        ),
        scale=LossScale(3, 1),
    )
    loss = ValueLoss(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None)
    (gradient_R,) = torch.autograd.grad(loss(inputs).loss, score_R)
    # Clipped to 0.5 the first is further from 1, which holds it; the others are off on their own.
    torch.testing.assert_close(gradient_R, torch.tensor([0.0, 0.4, -1.6]) / 3)
