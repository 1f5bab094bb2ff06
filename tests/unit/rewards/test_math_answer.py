# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers: extraction, and equivalence through math-verify."""

import pytest

from tandem.rewards.math_answer import (
    compute_answer_line_score,
    compute_boxed_score,
    is_equivalent,
    last_answer_line,
    last_boxed,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{12}.", "12"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"\boxed{12", None),
        ("12", None),
    ],
)
def test_last_boxed(text: str, content: str | None):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Thus.\nAnswer: 34", "34"),
        ("answer : $\\frac{1}{2}$.\n", r"\frac{1}{2}"),
        ("Answer: 1\nAnswer: \\boxed{34}", "34"),
        ("Answer: 34" + "x\n" * 200, None),
        ("34", None),
    ],
)
def test_last_answer_line(text: str, content: str | None):
    assert last_answer_line(text) == content


@pytest.mark.parametrize(
    ("answer", "ground_truth", "same"),
    [
        (r"\frac{1}{2}", r"\frac{1}{2}", True),
        (r"\dfrac{2}{4}", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        ("1,234", "1234", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        ("3", "4", False),
        ("no idea", "4", False),
        ("", "4", False),
    ],
)
def test_equivalence(answer: str, ground_truth: str, same: bool):
    assert is_equivalent(answer, ground_truth) is same


def test_unreadable_ground_truth_is_an_error_not_a_zero():
    with pytest.raises(ValueError, match="ground truth"):
        is_equivalent("4", "")


def test_scores_of_both_kinds():
    row = {"ground_truth": "12", "extra_info": {}}
    boxed = compute_boxed_score("lighteval/MATH", r"\boxed{1 2}", **row)
    assert boxed == {"score": 1.0, "acc": 1.0, "pred": "12"}
    unboxed = compute_boxed_score("lighteval/MATH", "it is 12", **row)
    assert unboxed == {"score": 0.0, "acc": 0.0, "pred": "[INVALID]"}
    right = compute_answer_line_score("math_dapo", "Answer: 12", **row)
    wrong = compute_answer_line_score("math_dapo", "it is 12", **row)
    assert right == {"score": 1.0, "acc": 1.0, "pred": "12"}
    assert wrong == {"score": -1.0, "acc": 0.0, "pred": "[INVALID]"}
