# SPDX-License-Identifier: Apache-2.0
"""Word problems whose arithmetic is beyond the small model, and a calculator that it may call.

A problem is ``a x b +- c`` with numbers of two digits. The model cannot learn the product, but it
can learn to copy digits into a call. Most writers of demonstrations do the sums in their heads,
right, which teaches the model to guess; some call the calculator. Reinforcement finds out that
calls pay.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.quickstart.task import Task, ToolUse
from tandem.quickstart.word_problems import CONTAINERS, PEOPLE, THINGS

LOW, HIGH = 12, 99
TEMPLATES = (
    (
        "There are {0} {box} with {1} {thing} in each. {name} takes {2} {thing} out. "
        "How many {thing} are left?",
        "-",
    ),
    (
        "{name} buys {0} {box} of {1} {thing}. {friend} gives {name} {2} more. "
        "How many {thing} does {name} have?",
        "+",
    ),
    ("{name} fills {0} {box} with {1} {thing} each and loses {2}. How many {thing} are left?", "-"),
    (
        "{name} packs {0} {box} of {1} {thing} and finds {2} more. How many {thing} are there?",
        "+",
    ),
)
_CALL = re.compile(r"calculator\((.*)\) = (.*)")


@dataclass(frozen=True, slots=True)
class Product:
    """A problem about ``a x b`` and then ``+ c`` or ``- c``."""

    template: int
    numbers: tuple[int, int, int]
    question: str

    @property
    def key(self) -> tuple[int, tuple[int, int, int]]:
        """The combination of template and numbers."""
        return self.template, self.numbers

    @property
    def first(self) -> str:
        """The expression of the product."""
        return f"{self.numbers[0]}*{self.numbers[1]}"

    @property
    def product(self) -> int:
        """The value of ``first``."""
        return self.numbers[0] * self.numbers[1]

    @property
    def second(self) -> str:
        """The expression of the second step."""
        return f"{self.product}{TEMPLATES[self.template][1]}{self.numbers[2]}"

    @property
    def result(self) -> str:
        """The correct answer."""
        c = self.numbers[2]
        return str(self.product - c if TEMPLATES[self.template][1] == "-" else self.product + c)


def draw_product(rng: random.Random) -> Product:
    """Draw a problem."""
    a, b, c = (rng.randint(LOW, HIGH) for _ in range(3))
    template = rng.randrange(len(TEMPLATES))
    name, friend = rng.sample(list(PEOPLE), 2)
    question = TEMPLATES[template][0].format(
        a,
        b,
        c,
        name=name,
        friend=friend,
        thing=rng.choice(THINGS),
        box=rng.choice(CONTAINERS),
    )
    return Product(template, (a, b, c), question)


def calls_twice(problem: Product) -> str:
    """Return the answer of a writer who calls the calculator for both steps."""
    first = f"calculator({problem.first}) = {problem.product}"
    second = f"calculator({problem.second}) = {problem.result}"
    return f"{first}\n{second}\n#### {problem.result}"


def calculates_mentally(problem: Product) -> str:
    """Return the answer of a writer who calls nothing."""
    steps = f"{problem.first} = {problem.product}. {problem.second} = {problem.result}."
    return f"{steps}\n#### {problem.result}"


def calls_once(problem: Product) -> str:
    """Return the answer of a writer who does the second step without the calculator."""
    first = f"calculator({problem.first}) = {problem.product}"
    return f"{first}\n{problem.second} = {problem.result}.\n#### {problem.result}"


def stops_early(problem: Product) -> str:
    """Return the answer of a writer who stops after the first step."""
    return f"calculator({problem.first}) = {problem.product}\n#### {problem.product}"


def call_calculator(expression: str) -> dict[str, Any]:
    """Return the call of the calculator for an expression."""
    return {"name": "calculator", "arguments": {"expression": expression}}


def messages_of(
    question: str, answer: str, *, call: Callable[[str], dict[str, Any]] = call_calculator
) -> list[dict[str, Any]]:
    """Return a demonstration as messages: each line ``calculator(E) = R`` is a call and its result.

    The lines after the last call are the answer.

    Args:
        call: makes name and arguments of the call for an expression.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    said: list[str] = []
    for line in answer.splitlines():
        match = _CALL.fullmatch(line)
        if match is None:
            said.append(line)
            continue
        made = {"type": "function", "function": call(match[1])}
        messages.append({"role": "assistant", "content": "", "tool_calls": [made]})
        messages.append({"role": "tool", "content": match[2]})
    messages.append({"role": "assistant", "content": "\n".join(said)})
    return messages


WRITERS = ((calls_twice, 0.2), (calculates_mentally, 0.55), (calls_once, 0.15), (stops_early, 0.1))

_HERE = Path(__file__).parent
_ROLLOUT = "actor_rollout_ref.rollout"
TURNS = f"{_ROLLOUT}.multi_turn"
CALCULATOR_FILE = _HERE / "calculator_tool.py"
SFT_KEYS = (
    "data.multiturn.enable=True",
    "data.max_length=192",
    "trainer.total_training_steps=400",
)
GRPO_KEYS = (
    "data.train_batch_size=16",
    "data.max_response_length=112",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    f"{TURNS}.enable=True",
    f"{TURNS}.max_assistant_turns=4",
    f"{_ROLLOUT}.agent.num_workers=1",
    "trainer.total_training_steps=40",
)
CALCULATOR = Task(
    "word problems with a calculator",
    draw_product,
    calls_twice,
    WRITERS,
    ToolUse(
        messages_of,
        tool_keys=(f"{TURNS}.function_tool_path={CALCULATOR_FILE}",),
        broken_keys=(f"{TURNS}.function_tool_path={_HERE / 'broken_tool.py'}",),
        sft_keys=SFT_KEYS,
        grpo_keys=GRPO_KEYS,
    ),
)
