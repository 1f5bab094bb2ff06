# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers: what is right for whom, and the scores of each rule."""

from collections.abc import Callable
from typing import Any

import pytest

from tandem.rewards.math_answer import (
    compute_answer_line_score,
    compute_boxed_score,
    compute_stated_score,
    compute_thought_score,
    is_equivalent,
)
from tandem.rewards.routing import find_rule
from tests.fakes.answer_forms import Response, draw_responses

NUM_RESPONSES = 150


SPELLINGS = r"""34|34.0|$34$|034|x = 34|17+17=34|(34)|34 dollars|34\text{ cm}^2|34^\circ|34\%|\$34
|**34**|34^{\text{th}}|\mathbf{34}"""
OTHERS = r"""17+17|68/2|\frac{68}{2}|2\cdot 17|17(2)|\sqrt{1156}|\binom{34}{1}|34^1|34+x-x|34/1|34!
|34 or 35|34, 35|34x|not 34|x > 34|0.34"""


@pytest.mark.parametrize("answer", SPELLINGS.split("|"))
def test_spellings_of_34(answer: str):
    assert is_equivalent(answer, "34")


@pytest.mark.parametrize("answer", OTHERS.split("|"))
def test_no_spellings_of_34(answer: str):
    assert not is_equivalent(answer, "34")


@pytest.mark.parametrize(
    ("answer", "ground_truth", "is_right"),
    [
        ("0.5", r"\frac{1}{2}", True),
        (r"\dfrac{2}{4}", r"\frac{1}{2}", True),
        ("1,234", "1234", True),
        ("7!", "5040", False),
        (r"\binom{5}{2}", "10", False),
        ("1,2", "2,1", False),
        ("1, 2", "1,2", True),
        (r"2,1", r"\{1,2\}", True),
        (r"2 \text{ and } 1", r"1 \text{ and } 2", True),
        ("(2,1)", "(1,2)", False),
        ("1,2", "(1,2)", True),
        ("x=1, x=2", "1,2", True),
        ("(1,2)", "[1,2]", False),
        (r"[3,\infty)", r"x\ge 3", True),
        ("y=2x+1", "2x+1", True),
        ("x=3", "y=3", False),
        ("(A)", r"\text{A}", True),
        ("B", "A", False),
        ("monday", r"\text{Monday}", True),
        (r"\frac{9}{2}\pi\text{ cm}^2", r"\frac{9\pi}{2}", True),
        ("n(n+1) ways", "n(n+1)", True),
        (r"3\pi\text{ cm}", r"3\pi\text{ m}", False),
        ("no idea", "4", False),
        ("", "4", False),
    ],
)
def test_an_answer_is_right_if_a_person_would_accept_it(
    answer: str, ground_truth: str, is_right: bool
):
    assert is_equivalent(answer, ground_truth) is is_right


@pytest.mark.parametrize("ground_truth", ["", "$$"])
def test_unreadable_ground_truth_is_an_error_not_a_zero(ground_truth: str):
    with pytest.raises(ValueError, match="ground truth"):
        is_equivalent("4", ground_truth)


def test_the_rules_judge_generated_answers_as_a_person_does():
    assert not misjudged(list(draw_responses(seed=0, count=NUM_RESPONSES)))


def misjudged(responses: list[Response]) -> list[Response]:
    def accuracy(response: Response) -> float:
        rule = find_rule(response.data_source)
        assert rule is not None
        row = {"ground_truth": response.ground_truth, "extra_info": {}}
        return rule(response.data_source, response.text, **row)["acc"]

    return [r for r in responses if bool(accuracy(r)) != r.is_right]


def score(rule: Callable[..., Any], text: str) -> dict[str, Any]:
    return rule("source", text, ground_truth="12", extra_info={})


def test_scores_of_a_box():
    right = score(compute_boxed_score, r"\boxed{1 2}")
    assert right == {"score": 1.0, "acc": 1.0, "pred": "12"}
    assert score(compute_boxed_score, "12") == {"score": 0.0, "acc": 0.0, "pred": "[INVALID]"}


def test_scores_of_a_line():
    right = {"score": 1.0, "acc": 1.0, "pred": "12"}
    assert score(compute_answer_line_score, "Answer: 12") == right
    assert score(compute_answer_line_score, r"so \boxed{12}") == right
    for text in ("it is 12", "Answer: 13\n\\boxed{12}", r"\boxed{12}" + 300 * "x"):
        assert score(compute_answer_line_score, text)["score"] == -1.0
        assert score(compute_answer_line_score, text)["acc"] == 0.0


def test_scores_of_a_statement():
    assert score(compute_stated_score, "The answer is 12.")["score"] == 1.0
    assert score(compute_stated_score, r"The answer is 12, no, \boxed{13}")["score"] == 0.0
    assert score(compute_stated_score, "")["pred"] == "[INVALID]"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"<think>a</think> \boxed{12}", 1.0),
        (r"<think>a</think> \boxed{13}", 0.1),
        (r"\boxed{12}", 0.9),
        ("12", 0.0),
    ],
)
def test_scores_of_thoughts_and_a_box(text: str, expected: float):
    assert score(compute_thought_score, text)["score"] == pytest.approx(expected)
