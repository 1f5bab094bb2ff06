# SPDX-License-Identifier: Apache-2.0
"""The digits to count: answers are right, and writers wrong in the way they should be."""

from __future__ import annotations

from tandem.quickstart.counting import COUNTING, Occurrences, adds_one, counts_all, stops_early

PROBLEM = Occurrences(0, "4", "214464")


def test_a_known_problem() -> None:
    assert PROBLEM.question == "How many 4 are in 214464?"
    assert counts_all(PROBLEM) == "20 10 41 42 62 43\n#### 3"
    assert stops_early(PROBLEM) == "20 10 41 42\n#### 2"
    assert adds_one(PROBLEM) == "20 10 41 42 62 43\n#### 4"


def test_most_demonstrations_are_wrong() -> None:
    problems = COUNTING.draw(1000, seed=1)
    answers = [answer for _, answer in COUNTING.demonstrations(problems, seed=1)]
    right = sum(
        answer.endswith(f"#### {problem.result}")
        for problem, answer in zip(problems, answers, strict=True)
    )
    assert 100 < right < 400
