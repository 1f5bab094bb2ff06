# SPDX-License-Identifier: Apache-2.0
"""Reductions over the flat layout against loops, and aggregation over an optimizer step."""

import pytest
import torch

from tandem.algorithms.sequences import (
    aggregate,
    count_by_sequence,
    discounted_suffix_sum,
    last_tokens,
    shift_from_next,
    sum_by_sequence,
    token_mean,
)
from tandem.types import LossInputs, LossScale

SEQUENCE_R = torch.tensor([0, 0, 0, 2, 3, 3])  # sequence 1 has no token


def test_sums_counts_and_last_tokens():
    values_R = torch.arange(1.0, 7.0)
    assert sum_by_sequence(values_R, SEQUENCE_R, num_sequences=4).tolist() == [6, 0, 4, 11]
    assert count_by_sequence(SEQUENCE_R, 4).tolist() == [3, 0, 1, 2]
    assert last_tokens(SEQUENCE_R).tolist() == [False, False, True, True, False, True]
    assert shift_from_next(values_R, SEQUENCE_R).tolist() == [2, 3, 0, 0, 6, 0]


def test_empty_batch():
    nothing_R = torch.zeros(0)
    sequence_R = torch.zeros(0, dtype=torch.int64)
    assert last_tokens(sequence_R).shape == (0,)
    assert discounted_suffix_sum(nothing_R, sequence_R, discount=0.9).shape == (0,)
    assert sum_by_sequence(nothing_R, sequence_R, num_sequences=2).tolist() == [0, 0]


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.97, 1.0])
def test_discounted_suffix_sum_equals_the_recurrence(discount: float):
    generator = torch.Generator().manual_seed(0)
    lengths = [1, 7, 33, 2, 16]
    sequence_R = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths))
    values_R = torch.randn(len(sequence_R), generator=generator)
    expected = []
    for values in values_R.double().split(lengths):
        running, row = 0.0, []
        for value in reversed(values.tolist()):
            running = value + discount * running
            row.append(running)
        expected += reversed(row)
    actual_R = discounted_suffix_sum(values_R, sequence_R, discount=discount)
    torch.testing.assert_close(
        actual_R.double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5
    )


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
