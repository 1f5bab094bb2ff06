# SPDX-License-Identifier: Apache-2.0
"""Aggregation with denominators of the whole optimizer step."""

import pytest
import torch

from tandem.algorithms.aggregation import aggregate, token_mean
from tandem.types import LossInputs, LossScale

# Two sequences of 1 and 3 tokens out of a step of 8 tokens in 4 sequences.
INPUTS = LossInputs(
    score_R=torch.zeros(4),
    entropy_R=None,
    sequence_R=torch.tensor([0, 1, 1, 1]),
    num_sequences=2,
    columns=None,
    scale=LossScale(num_tokens=8, num_sequences=4),
)
VALUES_R = torch.tensor([2.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 1.0),
        ("token-sum", 8.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 1.0),
        ("seq-mean-token-sum-norm", 0.5),
    ],
)
def test_share_of_each_aggregation(mode: str, expected: float):
    assert aggregate(VALUES_R, INPUTS, mode=mode, scale_factor=4.0).item() == expected


def test_token_mean_of_flags():
    assert token_mean(VALUES_R > 1, INPUTS).item() == 0.375


def test_unknown_mode_is_named():
    with pytest.raises(ValueError, match="loss_agg_mode='mean'.*token-mean"):
        aggregate(VALUES_R, INPUTS, mode="mean", scale_factor=None)
