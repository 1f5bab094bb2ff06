# SPDX-License-Identifier: Apache-2.0
"""The filter of dynamic sampling (DAPO, arXiv:2503.14476), which drops groups of equal rewards.

The pipeline draws more prompts until the batch is full. Failed rewards are ignored.
"""

from __future__ import annotations

from tandem.errors import UserError
from tandem.types import Group, RewardOutcome, RewardStatus

FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
"""The values of ``algorithm.filter_groups.metric``."""


def filter_values(group: Group, metric: str) -> list[float]:
    """Return the metric of each sample in the group whose reward did not fail.

    ``acc`` and ``score`` are the numbers that the reward function returned; ``seq_reward`` and
    ``seq_final_reward`` are the reward after shaping. None of them includes a KL penalty, which is
    subtracted later.

    Raises:
        UserError: the metric is unknown, or the reward function does not return it.
    """
    if metric not in FILTER_METRICS:
        raise UserError(
            "algorithm.filter_groups.metric",
            metric,
            rule="unknown",
            remedy=f"Use one of {', '.join(FILTER_METRICS)}.",
        )
    rewards = (sample.reward for sample in group.samples)
    return [_metric(reward, metric) for reward in rewards if reward.status is RewardStatus.VALUE]


def _metric(reward: RewardOutcome, metric: str) -> float:
    if metric in reward.extra:
        return reward.extra[metric]
    if metric == "acc":
        raise UserError(
            "algorithm.filter_groups.metric",
            metric,
            rule="the reward function does not return it",
            remedy="Return a mapping with 'acc', or set algorithm.filter_groups.metric=score.",
        )
    return reward.score


def is_informative(group: Group, metric: str) -> bool:
    """Return whether to keep the group: its values differ, or its only sample has a value."""
    values = filter_values(group, metric)
    if len(group.samples) == 1:
        return len(values) == 1
    return len(values) > 1 and min(values) != max(values)
