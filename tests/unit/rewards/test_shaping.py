# SPDX-License-Identifier: Apache-2.0
"""DAPO's overlong penalty."""

import pytest

from tandem.errors import UserError
from tandem.rewards.shaping import OverlongBuffer, overlong_penalty, shape_outcome
from tandem.types import RewardOutcome, RewardStatus

DAPO = OverlongBuffer(max_tokens=20480, buffer_tokens=4096, penalty_factor=1.0)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0)]
)
def test_vector(num_tokens: int, expected: float):
    assert overlong_penalty(num_tokens, DAPO) == expected


def test_shaping_keeps_what_was_right():
    right = RewardOutcome(RewardStatus.VALUE, 1.0, {"acc": 1.0})
    shaped = shape_outcome(right, DAPO, num_tokens=18432)
    assert shaped.score == 0.5
    assert shaped.extra == {"score": 1.0, "acc": 1.0, "overlong_reward": -0.5, "overlong": 1.0}
    quiet = OverlongBuffer(max_tokens=20480, buffer_tokens=4096, penalty_factor=2.0, log=False)
    assert shape_outcome(right, quiet, num_tokens=18432).extra == {"score": 1.0, "acc": 1.0}
    assert shape_outcome(right, quiet, num_tokens=18432).score == 0.0


def test_failures_are_not_shaped():
    failed = RewardOutcome(RewardStatus.TIMEOUT, float("nan"))
    assert shape_outcome(failed, DAPO, num_tokens=20480) is failed


@pytest.mark.parametrize("buffer_tokens", [0, 11])
def test_impossible_buffer_is_named(buffer_tokens: int):
    with pytest.raises(UserError, match=rf"overlong_buffer_cfg\.len={buffer_tokens}"):
        OverlongBuffer(max_tokens=10, buffer_tokens=buffer_tokens, penalty_factor=1.0)
