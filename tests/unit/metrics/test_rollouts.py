# SPDX-License-Identifier: Apache-2.0
"""Metrics of a step's rollouts under verl's names, with failures kept apart."""

import math

import torch

from tandem.metrics.rollouts import (
    advantage_metrics,
    length_metrics,
    reward_metrics,
    score_metrics,
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


def _sample(score, *, length=3, status=RewardStatus.VALUE, extra=None):
    completion = Completion(
        sample_id=0,
        token_ids=(5,) * length,
        log_probs=(-0.5,) * length,
        finish_reason=FinishReason.STOP,
        weights_version=0,
    )
    outcome = RewardOutcome(
        status=status,
        score=score if status is RewardStatus.VALUE else math.nan,
        extra=extra or {},
    )
    return Sample(trajectory=Trajectory.of_single_turn((1,), completion), text="", reward=outcome)


def _group(*samples, prompt_length=4):
    prompt = Prompt(
        uid=0,
        row=0,
        token_ids=(1,) * prompt_length,
        text="",
        data_source="s",
        ground_truth="1",
    )
    return Group(prompt=prompt, samples=samples)


def test_failed_rewards_are_left_out_and_counted():
    groups = [
        _group(_sample(1.0), _sample(0.0), _sample(9.0, status=RewardStatus.TIMEOUT)),
        _group(_sample(0.5), _sample(9.0, status=RewardStatus.ERROR), _sample(0.5)),
    ]

    scores = score_metrics(groups, rewards=[0.9, -0.1, math.nan, 0.4, 7.0, 0.4])
    rewards = reward_metrics(groups)

    assert scores == {
        "critic/score/mean": 0.5,
        "critic/score/max": 1.0,
        "critic/score/min": 0.0,
        "critic/rewards/mean": 0.4,
        "critic/rewards/max": 0.9,
        "critic/rewards/min": -0.1,
    }
    assert rewards["reward/timeouts"] == 1.0
    assert rewards["reward/errors"] == 1.0
    assert rewards["reward/failures"] == 2.0


def test_nothing_scored_gives_no_score():
    groups = [_group(_sample(0.0, status=RewardStatus.ERROR))]

    assert score_metrics(groups, rewards=[0.0]) == {}
    assert "reward/zero_variance_group_ratio" not in reward_metrics(groups)


def test_zero_variance_groups():
    groups = [
        _group(_sample(1.0), _sample(1.0)),
        _group(_sample(1.0), _sample(0.0)),
        _group(_sample(0.0), _sample(0.0)),
        _group(_sample(0.0), _sample(0.0, status=RewardStatus.TIMEOUT)),
        _group(_sample(0.5), _sample(0.5)),
    ]

    assert reward_metrics(groups)["reward/zero_variance_group_ratio"] == 0.75


def test_further_numbers_of_the_reward():
    groups = [
        _group(_sample(1.0, extra={"acc": 1.0, "format": 1.0}), _sample(0.0, extra={"acc": 0.0}))
    ]

    metrics = reward_metrics(groups)

    assert metrics["reward/acc/mean"] == 0.5
    assert metrics["reward/format/mean"] == 1.0


def test_lengths_and_clipped_shares_of_prompts_and_responses():
    groups = [
        _group(_sample(1.0, length=8), _sample(0.0, length=0), prompt_length=6),
        _group(_sample(1.0, length=4), _sample(0.0, length=8), prompt_length=4),
    ]

    metrics = length_metrics(groups, max_prompt_length=6, max_response_length=8)

    assert metrics["response_length/mean"] == 5.0
    assert metrics["response_length/max"] == 8.0
    assert metrics["response_length/min"] == 0.0
    assert metrics["response_length/clip_ratio"] == 0.5
    assert metrics["response_length_non_aborted/min"] == 4.0
    assert metrics["response_length_non_aborted/clip_ratio"] == 2 / 3
    assert metrics["response/aborted_ratio"] == 0.25
    assert metrics["prompt_length/mean"] == 5.0
    assert metrics["prompt_length/clip_ratio"] == 0.5


def test_lengths_of_nothing():
    assert length_metrics([], max_prompt_length=6, max_response_length=8) == {}


def test_advantages_and_returns():
    metrics = advantage_metrics(
        torch.tensor([1.0, -1.0, 0.75]), returns_R=torch.tensor([0.0, 0.5, 1.0])
    )

    assert metrics == {
        "critic/advantages/mean": 0.25,
        "critic/advantages/max": 1.0,
        "critic/advantages/min": -1.0,
        "critic/returns/mean": 0.5,
        "critic/returns/max": 1.0,
        "critic/returns/min": 0.0,
    }
    assert advantage_metrics(torch.zeros(0), returns_R=torch.zeros(0)) == {}
