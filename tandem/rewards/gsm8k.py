# SPDX-License-Identifier: Apache-2.0
"""GSM8K: exact match of the final number, by verl's definitions of strict and flexible.

Only the last 300 characters are searched. Strict takes the last ``#### number``, flexible the last
number anywhere. Numbers are compared as text: ``12.`` is not ``12``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NO_ANSWER = "[INVALID]"
"""The prediction of a response without an answer (verl's word)."""
_TAIL_CHARACTERS = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"-?[0-9.,]+")


def extract_answer(solution_str: str, method: str) -> str | None:
    """Return the answer as text or None; ``method`` is ``strict`` or ``flexible``.

    As in verl, strict drops thousands separators and flexible keeps them.

    Raises:
        ValueError: ``method`` is neither.
    """
    tail = solution_str[-_TAIL_CHARACTERS:]
    if method == "strict":
        answers = _STRICT.findall(tail)
        return answers[-1].replace(",", "") if answers else None
    if method == "flexible":
        numbers = _NUMBER.findall(tail)
        meaningful = [number for number in numbers if number != "."]
        # Among dots only, verl returns the first.
        return meaningful[-1] if meaningful else next(iter(numbers), None)
    raise ValueError(f"method={method!r}: must be strict or flexible.")


def compute_score(
    data_source: str,
    solution_str: str,
    *,
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    method: str = "strict",
    format_score: float = 0.0,
) -> Mapping[str, Any]:
    """Score a right answer 1, a wrong one ``format_score``, and a missing one 0.

    As in verl, ``acc`` equals the score. ``pred`` is the answer.
    """
    answer = extract_answer(solution_str, method)
    score = 0.0
    if answer is not None:
        score = 1.0 if answer == str(ground_truth) else format_score
    return {"score": score, "acc": score, "pred": NO_ANSWER if answer is None else answer}
