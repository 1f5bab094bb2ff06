# SPDX-License-Identifier: Apache-2.0
"""Limits of the reward pool; tests/distributed has the pool itself, with its processes."""

from __future__ import annotations

import pytest

from tandem.errors import UserError
from tandem.rewards.pool import RewardLimits


@pytest.mark.parametrize(
    ("values", "message"), [((0, 1.0), r"num_workers=0"), ((1, 0.0), r"timeout_s=0\.0")]
)
def test_impossible_limits_are_named(values: tuple[int, float], message: str):
    with pytest.raises(UserError, match=message):
        RewardLimits(*values)
