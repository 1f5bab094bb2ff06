# SPDX-License-Identifier: Apache-2.0
"""GSM8K rewards: verl's definitions of strict and flexible."""

from collections.abc import Mapping
from typing import Any

import pytest

from tandem.rewards.gsm8k import NO_ANSWER, compute_score, extract_answer


def score(solution: str, ground_truth: str, **options: object) -> float:
    judged = judge(solution, ground_truth, **options)
    assert judged["acc"] == judged["score"], "as verl's naive manager has it"
    return judged["score"]


def judge(solution: str, ground_truth: str, **options: object) -> Mapping[str, Any]:
    return compute_score(
        "openai/gsm8k",
        solution_str=solution,
        ground_truth=ground_truth,
        extra_info={},
        **options,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    ("solution", "ground_truth", "expected"),
    [
        ("so #### 1,234", "1234", 1.0),
        ("#### 12.", "12", 0.0),
        ("####12", "12", 0.0),
        ("#### $12", "12", 0.0),
        ("#### -3", "-3", 1.0),
        ("#### 12" + "x" * 294, "12", 0.0),  # the answer begins before the last 300 characters
        ("#### 12" + "x" * 293, "12", 1.0),
        ("#### 11 #### 12", "12", 1.0),
        ("#### 12 #### 11", "12", 0.0),
        ("12", "12", 0.0),
        ("", "12", 0.0),
    ],
)
def test_strict_reads_the_number_after_the_mark(solution: str, ground_truth: str, expected: float):
    assert score(solution, ground_truth) == expected


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("first 3 then 12", "12"),
        ("the answer is 12 .", "12"),
        ("the answer is 12.", "12."),
        ("1,234", "1,234"),
        ("no number . at all .", "."),
        ("none", None),
    ],
)
def test_flexible_takes_the_last_number(solution: str, answer: str | None):
    assert extract_answer(solution, "flexible") == answer


def test_options_of_the_rule_change_the_score():
    assert score("#### 11", "12", format_score=0.1) == 0.1
    assert score("11", "12", format_score=0.1) == 0.0
    assert score("it is 12", "12", method="flexible") == 1.0
    with pytest.raises(ValueError, match="strict or flexible"):
        score("12", "12", method="loose")


def test_the_prediction_is_what_was_compared():
    assert judge("so #### 1,234", "7")["pred"] == "1234"
    assert judge("so it is 1,234", "1234")["pred"] == NO_ANSWER
