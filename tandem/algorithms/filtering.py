# SPDX-License-Identifier: Apache-2.0
"""Dynamic sampling (DAPO, arXiv:2503.14476): groups whose samples all fare alike are dropped.

Only decides; drawing more prompts until the batch is full is the pipeline's part. Failed rewards
are left out.
"""

from __future__ import annotations

from tandem.errors import UserError
from tandem.types import Group, RewardOutcome, RewardStatus

FILTER_METRICS = ("acc", "score", "seq_reward", "seq_final_reward")
"""The values of ``algorithm.filter_groups.metric``."""


def filter_values(group: Group, metric: str) -> list[float]:
    """The metric of each sample of the group whose reward has a value.

    ``acc`` and ``score`` are what the reward function said; ``seq_reward`` and
    ``seq_final_reward`` the reward after shaping. (A KL penalty inside the reward is added later
    and is not part of any of them.)

    Raises:
        UserError: the metric is unknown, or the reward function does not return it.
    """
    if metric not in FILTER_METRICS:
        raise UserError(
            f"algorithm.filter_groups.metric={metric!r}: unknown. "
            f"Use one of {', '.join(FILTER_METRICS)}."
        )
    rewards = (sample.reward for sample in group.samples)
    return [_metric(reward, metric) for reward in rewards if reward.status is RewardStatus.VALUE]


def _metric(reward: RewardOutcome, metric: str) -> float:
    if metric in reward.extra:
        return reward.extra[metric]
    if metric == "acc":
        raise UserError(
            "algorithm.filter_groups.metric='acc': the reward function does not return it. "
            "Return a mapping with 'acc', or set algorithm.filter_groups.metric=score."
        )
    return reward.score


def is_informative(group: Group, metric: str) -> bool:
    """Whether to keep the group: its values differ, or it was sampled only once."""
    values = filter_values(group, metric)
    if len(group.samples) == 1:
        return len(values) == 1
    return len(values) > 1 and min(values) != max(values)
