# SPDX-License-Identifier: Apache-2.0
"""Typed outcomes of results and exceptions of reward functions, and DAPO's overlong penalty."""

import math

import numpy as np
import pytest

from tandem.errors import UserError
from tandem.rewards.custom import CustomReward
from tandem.rewards.scoring import (
    OverlongBuffer,
    RewardSpec,
    judge,
    load_scorer,
    overlong_penalty,
    score_request,
    shape_outcome,
)
from tandem.types import RewardOutcome, RewardRequest, RewardStatus


def request(solution: str = "#### 12", source: str = "openai/gsm8k") -> RewardRequest:
    return RewardRequest(source, solution, "12", {"index": 3}, num_tokens=9)


@pytest.mark.parametrize(
    ("returned", "score", "extra"),
    [
        (1, 1.0, {"acc": 1.0}),
        (True, 1.0, {"acc": 1.0}),
        (np.float32(0.5), 0.5, {"acc": 0.5}),
        ({"score": -1, "acc": False, "pred": "12", "len": 3}, -1.0, {"acc": 0.0, "len": 3.0}),
        ({"score": 1.0, "bad": math.nan, "none": None}, 1.0, {}),
    ],
)
def test_values(returned: object, score: float, extra: dict[str, float]):
    outcome = judge(returned)
    assert (outcome.status, outcome.score, outcome.extra) == (RewardStatus.VALUE, score, extra)


@pytest.mark.parametrize(
    ("returned", "prediction"),
    [
        (1.0, None),
        ({"score": 1}, None),
        ({"score": 1, "pred": "x"}, "x"),
        ({"score": 1, "pred": 7}, "7"),
    ],
)
def test_the_key_pred_is_the_prediction(returned: object, prediction: str | None):
    outcome = judge(returned)
    assert outcome.prediction == prediction
    assert "pred" not in outcome.extra


@pytest.mark.parametrize(
    ("returned", "detail"),
    [
        (math.nan, "returned nan (float)"),
        (math.inf, "returned inf (float)"),
        (None, "returned None (NoneType)"),
        ("1.0", "returned '1.0' (str)"),
        ((1.0, "x"), "returned (1.0, 'x') (tuple)"),
        ({"score": None}, "returned None (NoneType)"),
        ({"acc": 1.0}, "returned a mapping without 'score' (keys: acc)"),
    ],
)
def test_anything_else_is_an_error(returned: object, detail: str):
    outcome = judge(returned)
    assert outcome.status is RewardStatus.ERROR
    assert math.isnan(outcome.score)
    assert outcome.detail.startswith(detail)


def test_built_in_rule_with_shaping():
    scorer = load_scorer(RewardSpec(overlong=OverlongBuffer(10, 2, 1.0)))
    outcome = score_request(scorer, request())
    assert outcome.score == 0.5
    assert outcome.extra["acc"] == outcome.extra["score"] == 1.0


def test_source_without_rule_is_an_error():
    outcome = score_request(load_scorer(RewardSpec()), request(source="my/task"))
    assert outcome.status is RewardStatus.ERROR
    assert "my/task" in outcome.detail


def test_module_of_ours_as_custom_function_with_options():
    custom = CustomReward("pkg://tandem.rewards.gsm8k", "compute_score", {"method": "flexible"})
    scorer = load_scorer(RewardSpec(custom=custom))
    assert score_request(scorer, request("it is 12")).score == 1.0


DAPO = OverlongBuffer(max_tokens=20480, buffer_tokens=4096, penalty_factor=1.0)


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(1, 0.0), (16384, 0.0), (18432, -0.5), (20480, -1.0)]
)
def test_overlong_penalty(num_tokens: int, expected: float):
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
