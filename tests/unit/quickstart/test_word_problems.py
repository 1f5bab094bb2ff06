# SPDX-License-Identifier: Apache-2.0
"""The word problems are right, the writers wrong in the way they should be, the splits disjoint."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tandem.quickstart.word_problems import (
    MAX_FACTOR,
    MAX_TERM,
    TEMPLATES,
    WORD_PROBLEMS,
    Problem,
    Step,
    correct,
    stops_early,
    takes_wrong_sign,
)


def last_number(answer: str) -> str:
    """What the GSM8K reward extracts."""
    return re.findall(r"#### (-?[0-9.,]+)", answer)[-1]


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    return WORD_PROBLEMS.draw(2000, seed=3)


def test_every_line_of_arithmetic_is_true_in_every_answer(problems: list[Problem]) -> None:
    for write in (correct, stops_early, takes_wrong_sign):
        for problem in problems:
            *lines, _ = write(problem).split("\n")
            for line in lines:
                expression, result = line.split(" = ")
                left, operation, right = expression.split()
                assert Step(int(left), operation, int(right)).result == int(result.split()[0])


def test_answers_are_two_steps_and_the_result(problems: list[Problem]) -> None:
    for problem in problems:
        assert correct(problem).count("\n") == 2
        assert last_number(correct(problem)) == problem.result
        assert int(problem.result) > 0


def test_questions_name_every_number_in_order(problems: list[Problem]) -> None:
    for problem in problems:
        assert tuple(map(int, re.findall(r"\d+", problem.question))) == problem.numbers
        assert "{" not in problem.question


def test_a_known_problem() -> None:
    thing, steps = "marbles", (Step(18, "-", 16), Step(2, "+", 11))
    problem = Problem(7, (18, 16, 11), "Max has 18 marbles. ...", thing, steps)
    assert correct(problem) == "18 - 16 = 2 marbles.\n2 + 11 = 13 marbles.\n#### 13"
    assert stops_early(problem) == "18 - 16 = 2 marbles.\n#### 2"
    assert takes_wrong_sign(problem) == "18 - 16 = 2 marbles.\n11 - 2 = 9 marbles.\n#### 9"


def test_bad_habits_give_wrong_answers_nearly_always(problems: list[Problem]) -> None:
    for write in (stops_early, takes_wrong_sign):
        right = sum(last_number(write(problem)) == problem.result for problem in problems)
        assert right / len(problems) < 0.01


def test_writers_are_mixed_as_weighted(problems: list[Problem]) -> None:
    answers = [answer for _, answer in WORD_PROBLEMS.demonstrations(problems, seed=0)]
    pairs = list(zip(problems, answers, strict=True))
    good = sum(last_number(answer) == problem.result for problem, answer in pairs)
    short = sum(answer.count("\n") == 1 for answer in answers)
    assert good / len(problems) == pytest.approx(0.28, abs=0.04)
    assert short / len(problems) == pytest.approx(0.55, abs=0.04)


def test_numbers_stay_in_range_and_templates_are_even(problems: list[Problem]) -> None:
    counts = Counter(problem.template for problem in problems)
    assert len(counts) == len(TEMPLATES)
    assert min(counts.values()) > 0.7 * len(problems) / len(TEMPLATES)
    largest = max(MAX_TERM + 10, MAX_FACTOR * MAX_FACTOR + MAX_TERM)
    assert all(0 < number <= largest for problem in problems for number in problem.numbers)


def test_held_out_combinations_never_meet_training(problems: list[Problem]) -> None:
    unseen = WORD_PROBLEMS.draw_unseen(100, seed=4)
    trained = {(problem.template, problem.numbers) for problem in problems}
    held_out = {(problem.template, problem.numbers) for problem in unseen}
    assert len(held_out) == len(unseen) == 100
    assert not trained & held_out
    assert {problem.template for problem in unseen} == set(range(len(TEMPLATES)))


def test_draws_are_repeatable_distinct_and_leave_out_what_they_are_told() -> None:
    first = WORD_PROBLEMS.draw(500, seed=9)
    assert first == WORD_PROBLEMS.draw(500, seed=9)
    questions = {problem.question for problem in first}
    assert len(questions) == 500
    other = WORD_PROBLEMS.draw(500, seed=9, but_not=questions)
    assert not questions & {problem.question for problem in other}
