# SPDX-License-Identifier: Apache-2.0
"""Digits to sort, by selecting the smallest of those that are left, again and again."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.quickstart.task import Task

NUM_DIGITS = (4, 5)
"""The smallest and the largest number of digits to sort."""
SHAPES = (
    "Sort the digits {0}.",
    "Put {0} in order, the smallest first.",
    "Order these digits: {0}.",
)


@dataclass(frozen=True)
class Digits:
    """Digits from 1 to 9 to sort, all different."""

    shape: int
    digits: tuple[int, ...]

    @property
    def key(self) -> tuple[int, ...]:
        """The digits in the order of the question."""
        return self.digits

    @property
    def question(self) -> str:
        """The text of the prompt."""
        return SHAPES[self.shape].format(_joined(self.digits))

    @property
    def result(self) -> str:
        """The sorted digits as one number."""
        return _joined(sorted(self.digits))


def draw_digits(rng: random.Random) -> Digits:
    """Draw a shape of the question, and the digits."""
    shape = rng.randrange(len(SHAPES))
    return Digits(shape, tuple(rng.sample(range(1, 10), rng.randint(*NUM_DIGITS))))


def selects_smallest(problem: Digits) -> str:
    """Return the worked answer: the digits that are left, and the smallest of them."""
    lines: list[str] = []
    left = list(problem.digits)
    while len(left) > 1:
        lines.append(f"{_joined(left)}: {min(left)}")
        left.remove(min(left))
    return "\n".join([*lines, f"#### {problem.result}"])


def stops_after_two(problem: Digits) -> str:
    """Return the answer of a writer who selects two digits and keeps the order of the others."""
    first, second = sorted(problem.digits)[:2]
    left = [digit for digit in problem.digits if digit != first]
    rest = [digit for digit in left if digit != second]
    lines = (f"{_joined(problem.digits)}: {first}", f"{_joined(left)}: {second}")
    return "\n".join([*lines, f"#### {_joined((first, second, *rest))}"])


def sorts_downwards(problem: Digits) -> str:
    """Return the answer of a writer who writes the sorted digits in the wrong direction."""
    lines = selects_smallest(problem).splitlines()[:-1]
    return "\n".join([*lines, f"#### {problem.result[::-1]}"])


def _joined(digits: list[int] | tuple[int, ...]) -> str:
    return "".join(map(str, digits))


WRITERS = (
    (selects_smallest, 0.12),
    (stops_after_two, 0.63),
    (sorts_downwards, 0.25),
)

SORTING = Task("digits to sort", draw_digits, selects_smallest, WRITERS)
