# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them."""

from fractions import Fraction

import pytest

from tandem.rewards.math_number import is_same_number, read_number
from tandem.rewards.math_text import plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("34", 34),
        ("-1,234.50", Fraction(-12345, 10)),
        (r"1\,234{,}567", 1234567),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        (r"\frac34", Fraction(3, 4)),
        (r"1\frac{1}{2}", Fraction(3, 2)),
        ("1 1/2", Fraction(3, 2)),
        (r"0.1\overline{6}", Fraction(1, 6)),
        (r"3 \times 10^{8}", 3 * 10**8),
        ("2.5e-3", Fraction(25, 10_000)),
        ("3 million dollars", 3_000_000),
        (r"34\text{ cm}^2", 34),
        (r"60^\circ", 60),
        (r"12\%", 12),
    ],
)
def test_a_number_is_read_with_its_exact_value(text: str, value: Fraction):
    number = read_number(plain(text))
    assert number is not None
    assert number.value == value


@pytest.mark.parametrize(
    "text",
    [
        "17+17",
        "7!",
        "2^5",
        "34x",
        r"34\pi",
        "17(2)",
        "34 or 35",
        "34 minus 1",
        "x",
        "",
        "1/0",
        "34, 35",
    ],
)
def test_texts_that_are_no_numbers(text: str):
    assert read_number(plain(text)) is None


@pytest.mark.parametrize(
    ("answer", "truth", "is_same"),
    [
        ("0.5", r"\frac12", True),
        (r"\frac{2}{4}", r"\frac12", True),
        (r"\frac{2}{4}", "0.5", False),
        ("68/2", "34", False),
        ("50%", "0.5", True),
        ("50%", "50", True),
        ("50", "50%", True),
        ("0.5", "50", False),
        ("5 cm", "5 centimeters", True),
        ("5 m", "5 cm", False),
        ("5", "5 cm", True),
        ("3.14159", "3.1416", True),
        ("3.14", "3.1416", False),
        ("33.99", "34", False),
        ("1010_3", "1010_2", False),
    ],
)
def test_an_answer_is_the_same_number_if_it_is_no_harder_to_read(
    answer: str, truth: str, is_same: bool
):
    given, wanted = read_number(plain(answer)), read_number(plain(truth))
    assert given is not None
    assert wanted is not None
    assert is_same_number(given, wanted) is is_same


@pytest.mark.parametrize(
    "text", ["1" + ",000" * 1500, r"\frac{1}{" + "3" * 5000 + "}", "3" * 5000 + "/7"]
)
def test_more_digits_than_python_reads_are_no_number(text: str):
    assert read_number(plain(text)) is None
