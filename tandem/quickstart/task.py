# SPDX-License-Identifier: Apache-2.0
"""A task of the quickstart: problems with worked answers, and writers who make mistakes.

A checksum holds out one combination of a problem's numbers in twenty from the training data and the
ordinary test; the split of unseen numbers has only held-out ones. Answers end in ``#### NUMBER``,
which GSM8K's rule reads. No files are written.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

HELD_OUT_ONE_IN = 20
"""One in this many combinations of numbers is held out of the training data."""


class AnyProblem(Protocol):
    """A problem of some task.

    Attributes:
        question: the text of the prompt.
        result: the correct answer, as the reward compares it.
        key: the combination of numbers that the problem is about.
    """

    @property
    def question(self) -> str: ...

    @property
    def result(self) -> str: ...

    @property
    def key(self) -> Hashable: ...


P = TypeVar("P", bound=AnyProblem)


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tool of a task, with the demonstrations and the keys of recipes that go with it.

    Attributes:
        messages_of: turns question and answer of a demonstration into messages with calls.
        tool_keys, broken_keys: the keys of the tool, and of one that always fails in its place.
        sft_keys, grpo_keys: the keys of the recipes that differ.
    """

    messages_of: Callable[[str, str], list[dict[str, Any]]]
    tool_keys: Sequence[str]
    broken_keys: Sequence[str]
    sft_keys: Sequence[str]
    grpo_keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Task(Generic[P]):
    """A kind of problems.

    Attributes:
        name: the name in texts.
        draw_one: draws a problem.
        correct: writes the worked answer.
        writers: functions that write the answers of demonstrations, with their weights; most make
            mistakes.
        tools: what a task has whose answers call a tool; None for a task of single turns.
    """

    name: str
    draw_one: Callable[[random.Random], P]
    correct: Callable[[P], str]
    writers: Sequence[tuple[Callable[[P], str], float]]
    tools: ToolUse | None = None

    def draw(self, count: int, *, seed: int, but_not: Collection[str] = ()) -> list[P]:
        """Draw ``count`` problems with different texts and no held-out combination of numbers.

        Args:
            but_not: the texts of questions to leave out.
        """
        rng = random.Random(seed)
        seen = set(but_not)
        problems: list[P] = []
        while len(problems) < count:
            problem = self.draw_one(rng)
            if not is_held_out(problem) and problem.question not in seen:
                seen.add(problem.question)
                problems.append(problem)
        return problems

    def draw_unseen(self, count: int, *, seed: int) -> list[P]:
        """Draw ``count`` problems of different held-out combinations."""
        rng = random.Random(seed)
        problems: dict[Hashable, P] = {}
        while len(problems) < count:
            problem = self.draw_one(rng)
            if is_held_out(problem):
                problems.setdefault(problem.key, problem)
        return list(problems.values())

    def demonstrations(self, problems: Sequence[P], *, seed: int) -> Iterator[tuple[str, str]]:
        """Yield (question, answer) of each problem, the answer by a writer drawn at random."""
        rng = random.Random(seed)
        writers = [writer for writer, _ in self.writers]
        weights = [weight for _, weight in self.writers]
        for problem in problems:
            (write,) = rng.choices(writers, weights)
            yield problem.question, write(problem)


def is_held_out(problem: AnyProblem) -> bool:
    """Return whether this combination of numbers is held out of the training data."""
    return zlib.crc32(repr(problem.key).encode()) % HELD_OUT_ONE_IN == 0
