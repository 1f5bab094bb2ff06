# SPDX-License-Identifier: Apache-2.0
"""The built-in rule of each ``data_source`` (verl's names).

An unknown source is an error before the run starts, never a reward of 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from tandem.errors import UserError
from tandem.rewards import code_answer, gsm8k, math_answer, question_answer

RuleFunction = Callable[..., Any]
"""A function with verl's signature, called with ``data_source``, ``solution_str``, ``ground_truth``
and ``extra_info`` by name. It returns a number, or a mapping with ``score`` and more numbers."""

RULES: Mapping[str, RuleFunction] = MappingProxyType(
    {
        "openai/gsm8k": gsm8k.compute_score,
        "DigitalLearningGmbH/MATH-lighteval": math_answer.compute_boxed_score,
        "HuggingFaceH4/MATH-500": math_answer.compute_boxed_score,
        "lighteval/MATH": math_answer.compute_boxed_score,
        "numina_amc_aime": math_answer.compute_stated_score,
        "numina_aops_forum": math_answer.compute_stated_score,
        "numina_cn_k12": math_answer.compute_stated_score,
        "numina_olympiads": math_answer.compute_stated_score,
        "numina_synthetic_amc": math_answer.compute_stated_score,
        "numina_synthetic_math": math_answer.compute_stated_score,
        "hiyouga/geometry3k": math_answer.compute_thought_score,
        "math": math_answer.compute_answer_line_score,
        "math_dapo": math_answer.compute_answer_line_score,
        "math_dapo_reasoning": math_answer.compute_answer_line_score,
        "apps": code_answer.compute_score,
        "codecontests": code_answer.compute_score,
        "codeforces": code_answer.compute_score,
        "taco": code_answer.compute_score,
        "searchR1_2wikimultihopqa": question_answer.compute_score,
        "searchR1_bamboogle": question_answer.compute_score,
        "searchR1_hotpotqa": question_answer.compute_score,
        "searchR1_musique": question_answer.compute_score,
        "searchR1_nq": question_answer.compute_score,
        "searchR1_popqa": question_answer.compute_score,
        "searchR1_triviaqa": question_answer.compute_score,
    }
)
AIME_PREFIX = "aime"
"""The prefix of the sources that are scored like ``math_dapo``."""


def find_rule(data_source: str) -> RuleFunction | None:
    """Return the rule of a source, or None."""
    if data_source.startswith(AIME_PREFIX):
        return math_answer.compute_answer_line_score
    return RULES.get(data_source)


def runs_programs(data_sources: Iterable[str]) -> bool:
    """Return whether the rule of some source executes programs of the model."""
    return any(find_rule(data_source) is code_answer.compute_score for data_source in data_sources)


def check_sources(data_sources: Iterable[str]) -> None:
    """Raise UserError unless every source has a rule whose library is installed."""
    for data_source in sorted(set(data_sources)):
        rule = find_rule(data_source)
        if rule is None:
            raise UserError(
                "data_source",
                data_source,
                rule="no built-in reward",
                remedy=f"Built in are {', '.join(RULES)} and {AIME_PREFIX}*. "
                "Set custom_reward_function.path to a file that defines compute_score.",
            )
        needs_math_verify = rule.__module__ == math_answer.__name__
        if needs_math_verify and importlib.util.find_spec("math_verify") is None:
            raise UserError(
                "data_source",
                data_source,
                rule="its reward needs math-verify, which is not installed",
                remedy="Run pip install math-verify.",
            )
