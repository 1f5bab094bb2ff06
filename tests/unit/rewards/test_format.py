# SPDX-License-Identifier: Apache-2.0
"""The format reward."""

import pytest

from tandem.rewards.format import compute_score


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>one\ntwo</think>\n<answer>2</answer>", 1.0),
        ("<think></think><answer></answer>", 1.0),
        ("<think>a</think> so <answer>2</answer>", 0.0),
        ("<think>a<answer>2</answer></think><answer>2</answer>", 0.0),
        ("<answer>2</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_think_and_answer_tags(text: str, expected: float):
    assert compute_score("any", text, ground_truth=None, extra_info={}) == expected


def test_pattern_of_the_users():
    row = {"ground_truth": None, "extra_info": {}, "pattern": r".*####\s\d+"}
    assert compute_score("any", "a\nb #### 12", **row) == 1.0
    assert compute_score("any", "a\nb #### 12 apples", **row) == 0.0
