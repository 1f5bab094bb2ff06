# SPDX-License-Identifier: Apache-2.0
"""From scored groups to advantages: greedy baselines, and what their failure means."""

from __future__ import annotations

import math

from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.pipeline.batch import lay_out
from tandem.pipeline.experience import assign_credit
from tandem.pipeline.loop import initial_kl_controller
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

FAILED = RewardOutcome(RewardStatus.ERROR, math.nan, {}, "out of order")


def value(score: float) -> RewardOutcome:
    return RewardOutcome(RewardStatus.VALUE, score)


def scored(uid: int, *outcomes: RewardOutcome, baseline: RewardOutcome | None) -> Group:
    samples = [sample(k, outcome) for k, outcome in enumerate(outcomes)]
    prompt = Prompt(uid, uid, (3,), "", "source", "")
    greedy = None if baseline is None else sample(9, baseline)
    return Group(prompt, tuple(samples), greedy)


def sample(sample_id: int, outcome: RewardOutcome) -> Sample:
    completion = Completion(sample_id, (1, 2), (-0.5, -0.5), FinishReason.STOP, 0)
    return Sample(Trajectory.of_single_turn((3,), completion), "", outcome)


def test_remax_takes_the_greedy_score_of_the_same_prompt_as_baseline() -> None:
    config = load_config(RunConfig, ["algorithm.adv_estimator=remax"]).config
    batch = lay_out(
        [
            scored(0, value(1.0), value(0.25), baseline=value(0.25)),
            scored(1, value(1.0), FAILED, baseline=value(0.5)),
            scored(2, value(1.0), value(0.0), baseline=FAILED),
        ]
    )
    assert batch.valid_N.tolist() == [True, True, True, False, False, False]
    experience = assign_credit(batch, config=config, controller=initial_kl_controller(config))
    advantages_N = batch.mean_tokens(experience.advantages_R)
    assert advantages_N.tolist() == [0.75, 0.0, 0.5, 0.0, 0.0, 0.0]
    assert experience.computed_N.tolist() == [True, False, True, False, False, False]


def test_without_baselines_there_are_no_greedy_scores() -> None:
    batch = lay_out([scored(0, value(1.0), FAILED, baseline=None)])
    assert batch.greedy_scores_N is None
    assert batch.valid_N.tolist() == [True, False]
