# SPDX-License-Identifier: Apache-2.0
"""Short answers to questions: exact match of normalised text."""

from typing import Any

import pytest

from tandem.rewards.question_answer import compute_score, normalize


def score(text: str, ground_truth: Any) -> float:
    judged = compute_score("searchR1_nq", text, ground_truth=ground_truth, extra_info={})
    return judged["score"]


TRUTH = {"target": ["The Beatles", "Beatles (band)"]}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>the beatles.</answer>", 1.0),
        ("<answer>Beatles band</answer>", 1.0),
        ("<answer>Stones</answer> no <answer>\nBeatles\n</answer>", 1.0),
        ("<answer>Beatles</answer> no <answer>Stones</answer>", 0.0),
        ("<answer>The Beatles or Stones</answer>", 0.0),
        ("The Beatles", 0.0),
        (10 * "<answer>no</answer>" + "<answer>Beatles</answer>", 0.25),
        ("", 0.0),
    ],
)
def test_only_a_right_last_answer_scores(text: str, expected: float):
    assert score(text, TRUTH) == expected


@pytest.mark.parametrize("truth", ["Beatles", {"target": "Beatles"}, '{"target": ["Beatles"]}'])
def test_forms_of_the_ground_truth(truth: Any):
    assert score("<answer>Beatles</answer>", truth) == 1.0


@pytest.mark.parametrize("truth", [{}, {"target": []}, None])
def test_no_target_is_an_error_not_a_zero(truth: Any):
    with pytest.raises(ValueError, match="no target"):
        score("<answer>Beatles</answer>", truth)


def test_case_punctuation_and_articles_do_not_count():
    assert normalize("An  apple, a pear: THE end!") == "apple pear end"
