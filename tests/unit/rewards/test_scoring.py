# SPDX-License-Identifier: Apache-2.0
"""Typed outcomes of results and exceptions of reward functions, and DAPO's overlong penalty."""

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest

from tandem.errors import UserError
from tandem.rewards.custom import RewardFunction
from tandem.rewards.scoring import (
    OverlongBuffer,
    RewardSpec,
    judge,
    load_scorer,
    overlong_penalty,
    score_requests,
    score_requests_concurrently,
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
def test_a_number_or_a_mapping_with_a_score_is_a_value(
    returned: object, score: float, extra: dict[str, float]
):
    outcome = judge(returned)
    assert (outcome.status, outcome.score, outcome.extra) == (RewardStatus.VALUE, score, extra)


def test_other_values_are_kept_as_text():
    outcome = judge({"score": 1.0, "why": "short", "bad": math.nan, "found": ["7"]})
    assert outcome.texts == {"why": "short", "bad": "nan", "found": "['7']"}


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


def ignore(error: BaseException) -> None:
    """Take no notice of an error."""


def score(spec: RewardSpec, *requests: RewardRequest) -> list[RewardOutcome]:
    return score_requests(load_scorer(spec, on_error=ignore), requests)


def test_an_integer_that_no_float_holds_is_text_or_an_error():
    huge = 10**5000
    assert judge(huge).status is RewardStatus.ERROR
    outcome = judge({"score": 1.0, "value": huge, "pred": huge})
    assert (outcome.score, outcome.texts) == (1.0, {"value": "<int>"})
    assert outcome.prediction == "<int>"


def test_built_in_rule_with_shaping():
    (outcome,) = score(RewardSpec(overlong=OverlongBuffer(10, 2, 1.0)), request())
    assert outcome.score == 0.5
    assert outcome.extra["acc"] == outcome.extra["score"] == 1.0


def test_source_without_rule_is_an_error():
    (outcome,) = score(RewardSpec(), request(source="my/task"))
    assert outcome.status is RewardStatus.ERROR
    assert "my/task" in outcome.detail


def test_module_of_ours_as_custom_function_with_options():
    options = {"method": "flexible"}
    custom = RewardFunction("pkg://tandem.rewards.gsm8k", "compute_score", reward_kwargs=options)
    assert score(RewardSpec((custom,)), request("it is 12"))[0].score == 1.0


FUNCTIONS = """
import json

def correct(data_source, solution_str, ground_truth, extra_info):
    right = solution_str.endswith(ground_truth)
    return {"score": float(right), "acc": right, "pred": solution_str[-2:], "steps": 3}

def brief(data_source, solution_str, ground_truth, extra_info, limit=8):
    return {"score": float(len(solution_str) < limit), "why": "short", "acc": 0.5}

def cited(prompts, completions, index, **columns):
    return [None if number == 3 else 1.0 for number in index]

def parsed(data_source, solution_str, ground_truth, extra_info):
    return json.loads(solution_str)

def uneven(data_sources, solution_strs, ground_truths, extra_infos):
    return [1.0]

def alone(data_sources, solution_strs, ground_truths, extra_infos):
    return 1.0

def unordered(solution_strs, **_):
    return set(range(len(solution_strs)))

def score(data_source, solution_str, ground_truth, extra_info):
    return 1.0

async def awaited(data_source, solution_str, ground_truth, extra_info):
    return 2.0
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> str:
    file = tmp_path / "my_reward.py"
    file.write_text(FUNCTIONS)
    return str(file)


def functions(file: str, **weights: float) -> RewardSpec:
    return RewardSpec(
        tuple(RewardFunction(file, name, weight=weight) for name, weight in weights.items())
    )


def test_the_score_is_the_weighted_sum_and_each_part_keeps_its_name(reward_file: str):
    (outcome,) = score(functions(reward_file, correct=1.0, brief=0.25), request())
    assert outcome.score == 1.25
    assert outcome.extra == {"correct": 1.0, "brief": 1.0, "acc": 1.0, "correct/steps": 3.0}
    assert (outcome.prediction, outcome.texts) == ("12", {"brief/why": "short"})


def test_a_weight_makes_a_part_of_a_single_function(reward_file: str):
    (outcome,) = score(functions(reward_file, brief=0.5), request())
    assert (outcome.score, outcome.extra) == (0.5, {"brief": 1.0, "acc": 0.5})


def test_a_failed_part_fails_the_sample_and_names_the_line_of_the_user(reward_file: str):
    good, bad = score(functions(reward_file, parsed=1.0, brief=1.0), request("7"), request("{"))
    assert good.score == 8.0
    assert bad.status is RewardStatus.ERROR
    assert bad.detail.startswith("parsed: JSONDecodeError: ")
    assert bad.detail.endswith("(my_reward.py:15)")


def test_none_of_a_function_of_trl_does_not_count(reward_file: str):
    others = functions(reward_file, brief=1.0, cited=5.0)
    (outcome,) = score(others, request("7"))
    assert (outcome.score, outcome.extra) == (1.0, {"brief": 1.0, "acc": 0.5})
    (outcome,) = score(functions(reward_file, cited=5.0), request())
    assert "every function returned None" in outcome.detail


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("uneven", "returned 1 values for 2 responses"),
        ("unordered", "returned {0, 1} (set), not one value for each of 2 responses"),
        ("alone", "returned 1.0 (float), not one value for each of 2 responses"),
    ],
)
def test_a_batch_function_returns_one_value_for_each_response(
    reward_file: str, name: str, detail: str
):
    outcomes = score(functions(reward_file, **{name: 1.0}), request(), request())
    assert [detail in outcome.detail for outcome in outcomes] == [True, True]


def test_coroutine_functions_and_plain_ones_are_summed(reward_file: str):
    scorer = load_scorer(functions(reward_file, awaited=1.0, brief=1.0), on_error=ignore)
    assert scorer.is_concurrent and not scorer.takes_groups
    calls = score_requests_concurrently(scorer, [request(), request("long " * 9)], deadline_s=60)
    assert [outcome.score for outcome in asyncio.run(calls)] == [3.0, 2.0]


def test_of_several_functions_each_gets_the_keywords_that_it_takes(reward_file: str):
    def spec(**options: float) -> RewardSpec:
        names = ("correct", "brief")
        return RewardSpec(
            tuple(RewardFunction(reward_file, name, reward_kwargs=options) for name in names)
        )

    assert score(spec(limit=1), request())[0].extra["brief"] == 0.0
    with pytest.raises(UserError, match=r"reward_kwargs\.bonus: none of the functions correct, br"):
        load_scorer(spec(bonus=1), on_error=ignore)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("brief", "brief"), "'brief' names two functions"),
        (("brief", "score"), "'score' has a meaning of its own"),
    ],
)
def test_parts_need_names_of_their_own(reward_file: str, names: tuple[str, ...], message: str):
    spec = RewardSpec(tuple(RewardFunction(reward_file, name) for name in names))
    with pytest.raises(UserError, match=message):
        load_scorer(spec, on_error=ignore)


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
