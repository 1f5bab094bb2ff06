# SPDX-License-Identifier: Apache-2.0
"""Expressions beyond plain numbers: equal, and as simple as an answer has to be."""

import pytest

from tandem.rewards.math_form import is_equal_expression, num_operations
from tandem.rewards.math_text import plain


@pytest.mark.parametrize(
    ("answer", "truth", "is_right"),
    [
        (r"\sqrt{8}", r"2\sqrt{2}", True),
        (r"\frac12+\frac{\sqrt5}{2}", r"\frac{1+\sqrt5}{2}", True),
        ("(x+1)^2", "x^2+2x+1", True),
        ("x^2+2x+1", "(x+1)^2", True),
        ("1024", "2^{10}", True),
        (r"\sqrt{50}+\sqrt{32}", r"9\sqrt2", False),
        (r"\sqrt{2}\cdot\sqrt{3}", r"\sqrt6", False),
        (r"\frac{2\sqrt3}{4}", r"\frac{\sqrt3}{2}", False),
        ("(17+17)x", "34x", False),
        (r"\frac{68}{2}x", "34x", False),
        (r"\binom{5}{2}x", "10x", False),
        (r"3\pi", r"2\pi", False),
    ],
)
def test_equal_and_simple(answer: str, truth: str, is_right: bool):
    assert is_equal_expression(plain(answer), plain(truth)) is is_right


def test_a_power_too_large_to_compute_is_answered_at_once():
    assert not is_equal_expression("9^{9^{9^9}}x", "x")


@pytest.mark.parametrize(
    ("text", "count"),
    [("x", 0), ("17+17", 1), (r"2\sqrt{2}", 2), (r"\frac{3\pi}{2}", 2), ("-3", 0), ("7!", 1)],
)
def test_the_operations_that_a_text_shows_are_counted(text: str, count: int):
    assert num_operations(text) == count
