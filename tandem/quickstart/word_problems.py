# SPDX-License-Identifier: Apache-2.0
"""Word problems in GSM8K's form, made from templates: question, chain of thought, ``#### answer``.

Eight templates have two arithmetic steps each, with random names, things and small numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from tandem.quickstart.task import Task

PEOPLE = {
    "Tom": "he",
    "Anna": "she",
    "Ben": "he",
    "Mia": "she",
    "Sam": "he",
    "Lily": "she",
    "Max": "he",
    "Emma": "she",
    "Leo": "he",
    "Zoe": "she",
}
THINGS = (
    "apples",
    "books",
    "coins",
    "cards",
    "marbles",
    "pencils",
    "stamps",
    "shells",
    "eggs",
    "cookies",
    "stickers",
    "flowers",
)
CONTAINERS = ("boxes", "bags", "baskets", "packs", "jars", "trays")

MAX_TERM = 12
"""The largest number that is added or subtracted (a starting amount may be larger)."""
MAX_FACTOR = 6


@dataclass(frozen=True)
class Step:
    """A line of arithmetic; ``operation`` is one of + - *."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """The result of the line."""
        if self.operation == "+":
            return self.left + self.right
        return self.left - self.right if self.operation == "-" else self.left * self.right

    def line(self, thing: str) -> str:
        """Return the line as text, such as ``3 + 4 = 7 apples.``"""
        return f"{self.left} {self.operation} {self.right} = {self.result} {thing}."


@dataclass(frozen=True)
class Problem:
    """A question with its correct solution of two steps."""

    template: int
    numbers: tuple[int, ...]
    question: str
    thing: str
    steps: tuple[Step, Step]

    @property
    def result(self) -> str:
        """The correct answer, as the reward compares it."""
        return str(self.steps[1].result)

    @property
    def key(self) -> tuple[int, tuple[int, ...]]:
        """The combination of template and numbers."""
        return self.template, self.numbers


@dataclass(frozen=True)
class Draw:
    """The numbers of a question in the order its text names them, and the steps of the solution."""

    numbers: tuple[int, ...]
    steps: tuple[Step, Step]


@dataclass(frozen=True)
class Template:
    """A template of questions.

    Attributes:
        text: a format string with name, They, friend, thing, container and the numbers 0, 1, ...
        draw: the function that draws the numbers of a question.
    """

    text: str
    draw: Callable[[random.Random], Draw]


def _add_then_subtract(rng: random.Random) -> Draw:
    a, b = rng.randint(3, MAX_TERM), rng.randint(3, MAX_TERM)
    c = rng.randint(2, min(MAX_TERM, a + b - 1))
    return Draw((a, b, c), (Step(a, "+", b), Step(a + b, "-", c)))


def _multiply_then_subtract(rng: random.Random) -> Draw:
    a, b = rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_FACTOR)
    c = rng.randint(2, min(MAX_TERM, a * b - 1))
    return Draw((a, b, c), (Step(a, "*", b), Step(a * b, "-", c)))


def _multiply_then_add(rng: random.Random) -> Draw:
    a, b, c = rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_TERM)
    return Draw((a, b, c), (Step(a, "*", b), Step(a * b, "+", c)))


def _more_than_then_together(rng: random.Random) -> Draw:
    a, b = rng.randint(3, MAX_TERM), rng.randint(2, MAX_TERM)
    return Draw((a, b), (Step(a, "+", b), Step(a, "+", a + b)))


def _multiply_then_take_from(rng: random.Random) -> Draw:
    a, b = rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_FACTOR)
    total = a * b + rng.randint(1, MAX_TERM)
    return Draw((total, a, b), (Step(a, "*", b), Step(total, "-", a * b)))


def _times_then_together(rng: random.Random) -> Draw:
    a, b = rng.randint(3, MAX_FACTOR), rng.randint(2, 4)
    return Draw((a, b), (Step(a, "*", b), Step(a, "+", a * b)))


def _subtract_then_add(rng: random.Random) -> Draw:
    a = rng.randint(6, MAX_TERM + 10)
    b, c = rng.randint(2, min(MAX_TERM, a - 2)), rng.randint(2, MAX_TERM)
    return Draw((a, b, c), (Step(a, "-", b), Step(a - b, "+", c)))


TEMPLATES = (
    Template(
        "{name} has {0} {thing}. {They} buys {1} more and then gives {2} to {friend}. "
        "How many {thing} does {name} have now?",
        _add_then_subtract,
    ),
    Template(
        "There are {0} {container} with {1} {thing} in each. {name} takes {2} {thing} out. "
        "How many {thing} are left?",
        _multiply_then_subtract,
    ),
    Template(
        "{name} buys {0} {container} of {1} {thing}. {friend} gives {name} {2} more. "
        "How many {thing} does {name} have?",
        _multiply_then_add,
    ),
    Template(
        "{name} has {0} {thing}. {friend} has {1} more than {name}. "
        "How many {thing} do they have together?",
        _more_than_then_together,
    ),
    Template(
        "{name} finds {0} {thing} on Monday and {1} on Tuesday. On Friday {name} loses {2}. "
        "How many {thing} are left?",
        _add_then_subtract,
    ),
    Template(
        "{name} has {0} {thing}. {They} fills {1} {container} with {2} {thing} in each. "
        "How many {thing} are left over?",
        _multiply_then_take_from,
    ),
    Template(
        "{name} has {0} {thing}. {friend} has {1} times as many. "
        "How many {thing} do they have together?",
        _times_then_together,
    ),
    Template(
        "{name} has {0} {thing}. {They} loses {1} of them and later finds {2} more. "
        "How many {thing} does {name} have now?",
        _subtract_then_add,
    ),
)


def draw_problem(rng: random.Random) -> Problem:
    """Draw a problem: template, people, things and numbers."""
    name, friend = rng.sample(list(PEOPLE), 2)
    thing, container = rng.choice(THINGS), rng.choice(CONTAINERS)
    number = rng.randrange(len(TEMPLATES))
    draw = TEMPLATES[number].draw(rng)
    question = TEMPLATES[number].text.format(
        *draw.numbers,
        name=name,
        They=PEOPLE[name].capitalize(),
        friend=friend,
        thing=thing,
        container=container,
    )
    return Problem(number, draw.numbers, question, thing, draw.steps)


def correct(problem: Problem) -> str:
    """Return the worked answer."""
    first, second = problem.steps
    lines = (first.line(problem.thing), second.line(problem.thing), f"#### {second.result}")
    return "\n".join(lines)


def stops_early(problem: Problem) -> str:
    """Return the answer of a writer who stops after the first step."""
    first = problem.steps[0]
    return f"{first.line(problem.thing)}\n#### {first.result}"


def takes_wrong_sign(problem: Problem) -> str:
    """Return the answer of a writer who confuses + and - in the second step."""
    first, second = problem.steps
    if second.operation == "+":
        low, high = sorted((second.left, second.right))
        wrong = Step(high, "-", low)
    else:
        wrong = Step(second.left, "+", second.right)
    return f"{first.line(problem.thing)}\n{wrong.line(problem.thing)}\n#### {wrong.result}"


WRITERS = (
    (correct, 0.28),
    (stops_early, 0.55),
    (takes_wrong_sign, 0.17),
)
"""The writers of the demonstrations, with weights. The arithmetic is right in all of them.

Most writers stop early: accuracy starts low, and training has something to correct. More of the
others take the right sign than the wrong one. With equal weights, training could keep the wrong
sign for long in a template that resembles those of the opposite sign.
"""

WORD_PROBLEMS = Task("word problems", draw_problem, correct, WRITERS)
