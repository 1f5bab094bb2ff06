# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers, compared with the ground truth as mathematics, by math-verify.

The answer is the last ``\\boxed{...}`` or the last ``Answer: ...`` line; a response without one
scores like a wrong answer. verl compares normalised text instead; equal text is equal here too.
math-verify is imported only when two texts differ. Its time limits are switched off, because the
pool enforces the deadline.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

from tandem.rewards.gsm8k import NO_ANSWER

_TAIL_CHARACTERS = 300
_ANSWER_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_BOX = "\\boxed{"


def last_boxed(text: str) -> str | None:
    """Return the content of the last ``\\boxed{...}``, or None if it is missing or not closed."""
    start = text.rfind(_BOX)
    if start < 0:
        return None
    depth = 0
    for position in range(start + len(_BOX) - 1, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start + len(_BOX) : position]
    return None


def last_answer_line(text: str) -> str | None:
    """Return the text after the last ``Answer:`` in the last 300 characters, without its box."""
    lines = _ANSWER_LINE.findall(text[-_TAIL_CHARACTERS:])
    if not lines:
        return None
    answer = last_boxed(lines[-1]) or lines[-1]
    return answer.strip().rstrip(".").strip("$").strip()


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Return whether two LaTeX expressions are mathematically equal.

    Raises:
        ValueError: the ground truth is not a mathematical expression.
    """
    if _squeezed(answer) == _squeezed(ground_truth):
        return True
    return _math_verify()(answer, ground_truth)


def compute_boxed_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the last box holds the right answer, else 0 (MATH); ``pred`` is its content."""
    answer = last_boxed(solution_str)
    score = float(answer is not None and is_equivalent(answer, str(ground_truth)))
    return {"score": score, "acc": score, "pred": _prediction(answer)}


def compute_answer_line_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the ``Answer:`` line holds the right answer, else -1 (DAPO's scale).

    ``acc`` is 1 or 0, and ``pred`` is the answer.
    """
    answer = last_answer_line(solution_str)
    correct = answer is not None and is_equivalent(answer, str(ground_truth))
    score = 1.0 if correct else -1.0
    return {"score": score, "acc": float(correct), "pred": _prediction(answer)}


def _prediction(answer: str | None) -> str:
    """Return the answer for majority votes, without spacing and ``$``."""
    return NO_ANSWER if answer is None else _squeezed(answer)


def _squeezed(text: str) -> str:
    return re.sub(r"\s|\\[,!;]|\$", "", text)


@functools.cache
def _math_verify() -> Callable[[str, str], bool]:
    """Import math-verify, which takes about half a second, on first use."""
    from math_verify import LatexExtractionConfig, parse, verify

    # Without time limits it warns that the caller must enforce them, as the pool does.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read(expression: str) -> list[Any]:
        return parse(f"{_BOX}{expression}}}", [LatexExtractionConfig()], parsing_timeout=0)

    def equivalent(answer: str, ground_truth: str) -> bool:
        wanted = read(ground_truth)
        if not wanted:
            raise ValueError(f"ground truth {ground_truth!r} is not a mathematical expression")
        return verify(wanted, read(answer), timeout_seconds=0)

    return equivalent
