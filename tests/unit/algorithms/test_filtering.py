# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling: which groups are kept."""

import pytest

from tandem.algorithms.filtering import filter_values, is_informative
from tandem.errors import UserError
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


def value(score: float, extra: dict[str, float] | None = None) -> RewardOutcome:
    return RewardOutcome(RewardStatus.VALUE, score, extra or {})


FAILED = RewardOutcome(RewardStatus.TIMEOUT, float("nan"))


def group(*rewards: RewardOutcome) -> Group:
    prompt = Prompt(uid=0, row=0, token_ids=(1,), text="", data_source="", ground_truth="")
    completion = Completion(0, (1,), (0.0,), FinishReason.STOP, 0)
    trajectory = Trajectory.of_single_turn(prompt.token_ids, completion)
    return Group(prompt, tuple(Sample(trajectory, "", reward) for reward in rewards))


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((value(1), value(0), value(1)), True),
        ((value(1), value(1), value(1)), False),
        ((value(0.1), value(0.1), value(0.1)), False),
        ((value(1), value(1), FAILED), False),
        ((value(1), value(0), FAILED), True),
        ((value(1), FAILED), False),
        ((FAILED, FAILED), False),
        ((value(0),), True),
        ((FAILED,), False),
    ],
)
def test_groups_without_spread_are_dropped(rewards: tuple[RewardOutcome, ...], kept: bool):
    assert is_informative(group(*rewards), "seq_reward") is kept


def test_each_metric_reads_its_own_number():
    raw = {"acc": 1.0, "score": 1.0}
    shaped = group(value(0.5, raw), value(1.0, raw))
    assert not is_informative(shaped, "acc")
    assert not is_informative(shaped, "score")
    assert filter_values(shaped, "seq_reward") == [0.5, 1.0]
    assert is_informative(shaped, "seq_final_reward")
    assert filter_values(group(value(0.25)), "score") == [0.25]


def test_unknown_or_missing_metric_is_named():
    with pytest.raises(UserError, match=r"filter_groups\.metric='accuracy'.*acc, score"):
        filter_values(group(value(1)), "accuracy")
    with pytest.raises(UserError, match=r"filter_groups\.metric='acc'.*does not return"):
        filter_values(group(value(1)), "acc")
