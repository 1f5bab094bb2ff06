# SPDX-License-Identifier: Apache-2.0
"""Which built-in rule scores a row, by its ``data_source`` (verl's names).

An unknown source is an error before the run starts (``check_sources``), never a reward of 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

from tandem.errors import UserError
from tandem.rewards import gsm8k, math_answer

RuleFunction = Callable[..., Any]
"""A function with verl's signature, called with ``data_source``, ``solution_str``, ``ground_truth``
and ``extra_info`` by name. It returns a number, or a mapping with ``score`` and more numbers."""

RULES: dict[str, RuleFunction] = {
    "openai/gsm8k": gsm8k.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math_answer.compute_boxed_score,
    "HuggingFaceH4/MATH-500": math_answer.compute_boxed_score,
    "lighteval/MATH": math_answer.compute_boxed_score,
    "numina_amc_aime": math_answer.compute_boxed_score,
    "numina_aops_forum": math_answer.compute_boxed_score,
    "numina_cn_k12": math_answer.compute_boxed_score,
    "numina_olympiads": math_answer.compute_boxed_score,
    "numina_synthetic_amc": math_answer.compute_boxed_score,
    "numina_synthetic_math": math_answer.compute_boxed_score,
    "math": math_answer.compute_answer_line_score,
    "math_dapo": math_answer.compute_answer_line_score,
    "math_dapo_reasoning": math_answer.compute_answer_line_score,
}
AIME_PREFIX = "aime"
"""Sources that begin with this are scored like ``math_dapo``."""


def find_rule(data_source: str) -> RuleFunction | None:
    """The rule for a source, or None."""
    if data_source.startswith(AIME_PREFIX):
        return math_answer.compute_answer_line_score
    return RULES.get(data_source)


def check_sources(data_sources: Iterable[str]) -> None:
    """Check before a run that every source has a rule and that rule's library is installed.

    Raises:
        UserError: the first source of which that is not true.
    """
    for data_source in sorted(set(data_sources)):
        rule = find_rule(data_source)
        if rule is None:
            raise UserError(
                f"data_source={data_source!r}: no built-in reward. Built in are "
                f"{', '.join(RULES)} and {AIME_PREFIX}*. "
                "Set custom_reward_function.path to a file that defines compute_score."
            )
        needs_math_verify = rule is not gsm8k.compute_score
        if needs_math_verify and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"data_source={data_source!r}: its reward needs math-verify, which is missing. "
                "Run pip install math-verify."
            )
