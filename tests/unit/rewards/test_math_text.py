# SPDX-License-Identifier: Apache-2.0
"""Where the answer of a response stands, and its plain spelling."""

import pytest

from tandem.rewards.math_text import (
    last_answer_line,
    last_boxed,
    plain,
    split_outside,
    stated_answer,
)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"so \boxed{12}.", "12"),
        (r"\boxed{1} then \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\left\{1, 2\right\}}", r"\left\{1, 2\right\}"),
        (r"$\boxed \frac{1}{2}$ is it", r"\frac{1}{2}"),
        (r"\boxed 34 is it", "34"),
        (r"\fbox{34}", "34"),
        (r"\boxed{12", None),
        (r"\boxed", None),
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
        ("**Answer: $34$**", "34"),
        ("**Answer:** 34", "34"),
        ("Answer: The value is $34$.", "34"),
        (r"Answer: The value is $\$34$.", "34"),
        ("Answer: $34$ or $35$", "34 or 35"),
        ("Answer: 34" + "x\n" * 200, None),
        ("34", None),
    ],
)
def test_last_answer_line(text: str, content: str | None):
    line = last_answer_line(text)
    assert (None if line is None else plain(line)) == content


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("We add. The answer is 34.", "34"),
        ("So $34$ is the answer.", "34"),
        ("Thus -1, 4 is the answer.", "-1, 4"),
        ("The final result is: 2:3", "2:3"),
        ("So x = 34", "34"),
        (r"Answer: \textbf{A}", "A"),
        ("Therefore the total is 34.", "34"),
        (r"The answer is 33, no, \boxed{34}", "34"),
        ("34", "34"),
        ("Therefore it is 34. OK.", "34"),
        (r"We get \pi", r"\pi"),
        ("", None),
    ],
)
def test_stated_answer(text: str, content: str | None):
    answer = stated_answer(text)
    assert (None if answer is None else plain(answer)) == content


@pytest.mark.parametrize(
    ("text", "spelled"),
    [
        (r"\dfrac12", r"\frac{1}{2}"),
        (r"\left(1,\ 2\right)", "(1, 2)"),
        ("**$34$**.", "34"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"34^{\circ}", "34 degrees"),
        (r"S = \textbf{\text{-3}}", "S = -3"),
        (r"\boxed{\boxed{34}}", "34"),
        (r"\begin{pmatrix}1\\ 2\end{pmatrix}", r"\begin{pmatrix}1\\ 2\end{pmatrix}"),
    ],
)
def test_a_text_has_one_plain_spelling(text: str, spelled: str):
    assert plain(text) == spelled


def test_a_separator_inside_brackets_splits_nothing():
    assert split_outside("(1,2), f(3, 4)", ",") == ["(1,2)", "f(3, 4)"]
