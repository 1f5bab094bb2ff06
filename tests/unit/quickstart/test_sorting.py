# SPDX-License-Identifier: Apache-2.0
"""The digits to sort: answers are right, and writers wrong in the way they should be."""

from __future__ import annotations

from tandem.quickstart.sorting import (
    SORTING,
    Digits,
    selects_smallest,
    sorts_downwards,
    stops_after_two,
)


def test_a_known_problem() -> None:
    problem = Digits(0, (7, 3, 9, 1))
    assert problem.question == "Sort the digits 7391."
    assert selects_smallest(problem) == "7391: 1\n739: 3\n79: 7\n#### 1379"
    assert stops_after_two(problem) == "7391: 1\n739: 3\n#### 1379"
    assert sorts_downwards(problem).endswith("\n#### 9731")
    assert stops_after_two(Digits(0, (9, 3, 7, 1))).endswith("\n#### 1397")


def test_results_are_sorted_and_most_demonstrations_wrong() -> None:
    problems = SORTING.draw(1000, seed=1)
    assert all(problem.result == "".join(sorted(problem.result)) for problem in problems)
    answers = [answer for _, answer in SORTING.demonstrations(problems, seed=1)]
    right = sum(
        answer.endswith(f"#### {problem.result}")
        for problem, answer in zip(problems, answers, strict=True)
    )
    assert 80 < right < 350
