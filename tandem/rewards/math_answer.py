# SPDX-License-Identifier: Apache-2.0
"""The rules of mathematics: whether the answer of a response is the ground truth.

The rules differ in where they look for the answer (``math_text``) and compare it in the same way,
which accepts more than equal text (verl's rule) but not every expression of equal value:

- a ground truth that is a number takes a number (``math_number``), written in any way;
- lists are compared part by part and in order, and in any order if the ground truth is a set;
- any other expression is compared as mathematics, and must be finished (``math_form``).

``x = 34`` is the answer 34. docs/reward_rules.md has examples.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tandem.rewards.gsm8k import NO_ANSWER
from tandem.rewards.math_form import is_equal_expression
from tandem.rewards.math_number import is_same_number, read_number, read_unit
from tandem.rewards.math_text import (
    boxed_at_the_end,
    last_answer_line,
    last_boxed,
    plain,
    split_outside,
    split_unit,
    squeeze,
    stated_answer,
)

_NAME = re.compile(r"[A-Za-z](?:_\w|_\{\w+\}|'|\([a-z]\))?")
_MEMBER = re.compile(r"[a-z] ?(?:\\in(?![a-z])|\u2208) ?")
_RELATION = re.compile(r"[<>]|\\(?:le|ge|ne)(?![A-Za-z])")
_WORDS = re.compile(r"[A-Za-z ]+")
_AND = re.compile(r",? (?:or|and) ")
_LETTER = re.compile(r"\(?([A-Za-z])\)")
_THOUGHTS = re.compile(r"<think>.*</think>.*\\boxed\{.*\}.*", re.DOTALL)
_FORMAT_SHARE = 0.1


def is_equivalent(answer: str, ground_truth: str) -> bool:
    """Return whether a person would accept ``answer`` for ``ground_truth``.

    Raises:
        ValueError: the ground truth is empty or not a mathematical expression.
    """
    given, wanted = plain(answer), plain(ground_truth)
    if not wanted:
        raise ValueError(f"ground truth {ground_truth!r} is empty")
    if not given or _has_number(wanted):
        return _is_equal(given, wanted)
    (given, unit), (wanted, wanted_unit) = split_unit(answer), split_unit(ground_truth)
    if unit and wanted_unit and read_unit(plain(unit)) != read_unit(plain(wanted_unit)):
        return False
    return _is_equal(plain(given), plain(wanted))


def compute_boxed_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the last box holds the right answer, else 0 (MATH); ``pred`` is its content."""
    return _judge(last_boxed(solution_str), ground_truth)


def compute_stated_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the last box, or else the last statement, is the right answer (Numina)."""
    return _judge(stated_answer(solution_str), ground_truth)


def compute_answer_line_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 1 if the ``Answer:`` line holds the right answer, else -1 (DAPO's scale).

    Without such a line the last box of the last 300 characters is the answer. ``acc`` is 1 or 0,
    and ``pred`` is the answer.
    """
    answer = last_answer_line(solution_str)
    judged = _judge(boxed_at_the_end(solution_str) if answer is None else answer, ground_truth)
    return {**judged, "score": 1.0 if judged["acc"] else -1.0}


def compute_thought_score(
    data_source: str, solution_str: str, *, ground_truth: Any, extra_info: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Score 0.9 for the right answer in the last box and 0.1 for the format (Geometry3K).

    The format is ``<think>...</think>`` and a box behind it. ``acc`` is 1 or 0.
    """
    judged = _judge(last_boxed(solution_str), ground_truth)
    has_format = _THOUGHTS.fullmatch(solution_str) is not None
    score = (1.0 - _FORMAT_SHARE) * judged["acc"] + _FORMAT_SHARE * has_format
    return {**judged, "score": score, "format": float(has_format)}


def _judge(answer: str | None, ground_truth: Any) -> dict[str, Any]:
    score = float(answer is not None and is_equivalent(answer, str(ground_truth)))
    prediction = NO_ANSWER if answer is None else squeeze(plain(answer))
    return {"score": score, "acc": score, "pred": prediction}


def _is_equal(given: str, wanted: str) -> bool:
    """Compare two plain texts, or two parts of them."""
    if squeeze(given) == squeeze(wanted):
        return True
    given_name, given = _unnamed(given)
    wanted_name, wanted = _unnamed(wanted)
    if given_name and wanted_name and given_name != wanted_name:
        return False
    if "=" not in wanted and len(split_outside(given, ",")) == 1:
        given = split_outside(given, "=")[-1]
    if _spelled(given) == _spelled(wanted):
        return True
    number = read_number(wanted)
    if number is not None:
        other = read_number(given)
        return other is not None and is_same_number(other, number)
    is_relation = _RELATION.search(given + wanted) is not None
    if not is_relation and (_is_list(wanted) or _is_list(given)):
        return _is_equal_list(given, wanted)
    if not given or _is_word(wanted) and _is_word(given) or _is_long_word(wanted):
        return False
    return is_equal_expression(given, wanted)


def _is_word(text: str) -> bool:
    return _WORDS.fullmatch(_spelled(text)) is not None


def _is_long_word(text: str) -> bool:
    return _is_word(text) and len(squeeze(text)) > 3


def _is_list(text: str) -> bool:
    return len(_parts(text)) > 1 or _bracket(text) == "{"


def _is_equal_list(given: str, wanted: str) -> bool:
    opening, other = _bracket(wanted), _bracket(given)
    is_interval = opening in ("[", "[)", "(]") or other in ("[)", "(]")
    if opening != other and (is_interval or opening and other):
        return False
    parts, others = _parts(given), _parts(wanted)
    if len(parts) != len(others):
        return False
    if opening != "{" and not (not opening and _AND.search(wanted)):
        return all(map(_is_equal, parts, others))
    for part in parts:
        match = next((known for known in others if _is_equal(part, known)), None)
        if match is None:
            return False
        others.remove(match)
    return True


def _bracket(text: str) -> str:
    """Return the kind of brackets around a plain text: ``(``, ``[``, ``{``, ``[)``, ``(]``."""
    if text.startswith("\\{") and text.endswith("\\}"):
        return "{"
    ends = text[:1] + text[-1:]
    kinds = {"()": "(", "[]": "[", "[)": "[)", "(]": "(]"}
    is_one = len(split_outside(text, ",")) == 1 and len(split_outside(text, "\\cup")) == 1
    return kinds.get(ends, "") if is_one and not split_outside(text[1:-1], "\0")[1:] else ""


def _parts(text: str) -> list[str]:
    """Return the parts of a list with or without brackets, or the text alone."""
    text = text.strip()
    kind = _bracket(text)
    inside = text[2:-2] if kind == "{" else text[1:-1] if kind else text
    parts = split_outside(_AND.sub(", ", inside), ",")
    if not kind and len(parts) == 1:
        return split_outside(text, "\\cup")
    return parts if len(parts) > 1 or kind == "{" else [text]


def _unnamed(text: str) -> tuple[str, str]:
    """Split ``x = 34`` into name and value; the name is empty if there is none."""
    member = _MEMBER.match(text)
    if member is not None:
        return "", text[member.end() :].strip()
    name, equals, value = text.partition("=")
    if equals and "=" not in value and _NAME.fullmatch(squeeze(name)):
        return squeeze(name), value.strip()
    return "", text


def _spelled(text: str) -> str:
    """Return the text in one spelling of choices, products and quotients."""
    squeezed = squeeze(text)
    letter = _LETTER.fullmatch(squeezed)
    if letter is not None:
        squeezed = letter[1]
    if squeezed.isalpha():
        return squeezed.lower()
    squeezed = re.sub(r"\\(?:cdot|times)(?![a-z])", "*", squeezed)
    return re.sub(r"(?<![\w}])(\d+)/(\d+)(?!\w)", r"\\frac{\1}{\2}", squeezed)


def _has_number(text: str) -> bool:
    return read_number(_unnamed(text)[1]) is not None
