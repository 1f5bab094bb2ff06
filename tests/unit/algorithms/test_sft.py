# SPDX-License-Identifier: Apache-2.0
"""The loss of supervised fine-tuning."""

import pickle

import pytest
import torch

from tandem.algorithms.sft import SftLoss
from tandem.types import LossInputs, LossScale


def micro_batch(logp_R: torch.Tensor, lengths: list[int]) -> LossInputs:
    return LossInputs(
        score_R=logp_R,
        entropy_R=None,
        sequence_R=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        num_sequences=len(lengths),
        columns=None,
        scale=LossScale(num_tokens=6, num_sequences=3),
    )


def test_micro_batches_add_up_to_the_token_mean():
    logp_R = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0], requires_grad=True)
    loss = SftLoss()
    whole = loss(micro_batch(logp_R, [1, 2, 3]))
    parts = [loss(micro_batch(logp_R[:1], [1])), loss(micro_batch(logp_R[1:], [2, 3]))]
    total = parts[0].loss + parts[1].loss
    assert whole.loss.item() == pytest.approx(3.5, abs=1e-6)
    assert total.item() == pytest.approx(3.5, abs=1e-6)
    assert sum(p.metrics["train/loss"].item() for p in parts) == pytest.approx(3.5, abs=1e-6)
    (gradient,) = torch.autograd.grad(total, logp_R)
    torch.testing.assert_close(gradient, torch.full((6,), -1 / 6))


def test_needs_no_entropy_and_survives_pickling():
    loss = pickle.loads(pickle.dumps(SftLoss()))
    assert loss == SftLoss() and not loss.needs_entropy
