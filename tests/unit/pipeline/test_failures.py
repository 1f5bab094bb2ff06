# SPDX-License-Identifier: Apache-2.0
"""Failed rewards are said aloud, with the cause of the first."""

import math

import pytest

from tandem.errors import UserError
from tandem.pipeline.failures import (
    GENERATION_FAILED,
    PENDING,
    RewardGuard,
    StaleSampleError,
    require_fresh,
    warn_of_failed_rewards,
)
from tandem.types import (
    Completion,
    FinishReason,
    Group,
    Prompt,
    RewardOutcome,
    RewardStatus,
    Sample,
    Trajectory,
)

GOOD = RewardOutcome(RewardStatus.VALUE, 1.0)
LATE = RewardOutcome(RewardStatus.TIMEOUT, math.nan, {}, "no result within 3 s")


def group(*outcomes: RewardOutcome) -> Group:
    completion = Completion(0, (1,), (-0.5,), FinishReason.STOP, 0)
    trajectory = Trajectory.of_single_turn((1,), completion)
    prompt = Prompt(0, 0, (1,), "", "source", "")
    return Group(prompt, tuple(Sample(trajectory, "", outcome) for outcome in outcomes))


def test_one_line_counts_failures_and_names_the_first(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_failed_rewards([group(GOOD, LATE), group(LATE, GOOD)], "step 3")
    (record,) = caplog.records
    assert record.getMessage() == (
        "step 3: 2 of 4 rewards failed and do not count; the first: no result within 3 s"
    )


def test_generations_that_only_fail_blame_the_learning_rate() -> None:
    guard = RewardGuard(2, path="r.py", learning_rate=0.5)
    guard.check([GENERATION_FAILED, PENDING, GENERATION_FAILED])
    with pytest.raises(UserError, match=r"optim\.lr=0\.5: none of the last 2 samples counts"):
        guard.check([GENERATION_FAILED])


def test_nothing_is_said_without_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_failed_rewards([group(GOOD, GOOD)], "step 3")
    assert not caplog.records


def test_rewards_that_only_fail_end_the_run_with_the_cause() -> None:
    guard = RewardGuard(4, path="r.py", learning_rate=0.1)
    guard.check([LATE, LATE, LATE])
    guard.check([GOOD, LATE])
    guard.check([LATE, LATE])
    with pytest.raises(
        UserError, match="path='r.py': the last 4 rewards all failed.*no result within 3 s"
    ):
        guard.check([LATE, GOOD])


@pytest.mark.parametrize(
    ("version", "max_lag", "is_fresh"), [(3, 0, False), (4, 1, True), (4, 0, False), (6, 3, True)]
)
def test_a_token_that_is_too_old_or_too_new_is_never_used(
    version: int, max_lag: int, is_fresh: bool
) -> None:
    """The sample was begun by version 3 and ended by version 4."""
    completion = Completion(7, (1, 2, 3), (-0.5,) * 3, FinishReason.STOP, 3, ((2, 4),))
    sample = Sample(Trajectory.of_single_turn((1,), completion), "", GOOD)
    groups = [Group(Prompt(0, 0, (1,), "", "source", ""), (sample,))]
    if is_fresh:
        require_fresh(groups, version=version, max_lag=max_lag)
        return
    with pytest.raises(
        StaleSampleError, match=rf"sample 7 .* \[3, 4\] and cannot train version {version};"
    ):
        require_fresh(groups, version=version, max_lag=max_lag)
