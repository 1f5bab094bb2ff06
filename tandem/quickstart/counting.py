# SPDX-License-Identifier: Apache-2.0
"""Occurrences of a digit to count, by writing each digit with the count so far."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tandem.quickstart.task import Task

NUM_DIGITS = (6, 8)
"""The smallest and the largest number of digits to look at."""
DIGITS = "123456"
FIRST_PART = 4
"""The number of digits that a hasty writer looks at."""
SHAPES = (
    "How many {0} are in {1}?",
    "Count the {0} in {1}.",
    "Look at {1}. How often is there a {0}?",
)


@dataclass(frozen=True)
class Occurrences:
    """A row of digits, of which one is to be counted."""

    shape: int
    wanted: str
    digits: str

    @property
    def key(self) -> tuple[str, str]:
        """The digit to count and the row."""
        return self.wanted, self.digits

    @property
    def question(self) -> str:
        """The text of the prompt."""
        return SHAPES[self.shape].format(self.wanted, self.digits)

    @property
    def result(self) -> str:
        """The number of occurrences."""
        return str(self.digits.count(self.wanted))


def draw_occurrences(rng: random.Random) -> Occurrences:
    """Draw a row in which about every third digit is the wanted one."""
    wanted = rng.choice(DIGITS)
    digits = [
        wanted if rng.random() < 0.3 else rng.choice(DIGITS)
        for _ in range(rng.randint(*NUM_DIGITS))
    ]
    return Occurrences(rng.randrange(len(SHAPES)), wanted, "".join(digits))


def counts_all(problem: Occurrences) -> str:
    """Return the worked answer: each digit with the count so far, and the number."""
    return _answer(problem, len(problem.digits), added=0)


def stops_early(problem: Occurrences) -> str:
    """Return the answer of a writer who looks at the first digits only."""
    return _answer(problem, FIRST_PART, added=0)


def adds_one(problem: Occurrences) -> str:
    """Return the answer of a writer who counts one too many at the end."""
    return _answer(problem, len(problem.digits), added=1)


def _answer(problem: Occurrences, num_digits: int, *, added: int) -> str:
    seen = problem.digits[:num_digits]
    counts = [seen[: end + 1].count(problem.wanted) for end in range(num_digits)]
    line = " ".join(f"{digit}{count}" for digit, count in zip(seen, counts, strict=True))
    return f"{line}\n#### {counts[-1] + added}"


WRITERS = (
    (counts_all, 0.1),
    (stops_early, 0.5),
    (adds_one, 0.4),
)

COUNTING = Task("digits to count", draw_occurrences, counts_all, WRITERS)
