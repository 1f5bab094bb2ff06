# SPDX-License-Identifier: Apache-2.0
"""Which rule scores which source."""

import pytest

from tandem.errors import UserError
from tandem.rewards.gsm8k import compute_score
from tandem.rewards.math_answer import compute_answer_line_score, compute_boxed_score
from tandem.rewards.routing import RULES, check_sources, find_rule, runs_programs


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("openai/gsm8k", compute_score),
        ("lighteval/MATH", compute_boxed_score),
        ("math_dapo", compute_answer_line_score),
        ("aime2024", compute_answer_line_score),
        ("my/task", None),
    ],
)
def test_rule_of_a_source(source: str, rule: object):
    assert find_rule(source) is rule


def test_unknown_source_is_an_error_before_the_run():
    check_sources([*RULES, "aime_2025"])
    with pytest.raises(UserError, match=r"data_source='my/task'.*openai/gsm8k.*aime\*.*path"):
        check_sources({"openai/gsm8k", "my/task"})


def test_the_sources_whose_rule_runs_programs():
    assert runs_programs(["openai/gsm8k", "taco"])
    assert not runs_programs(["openai/gsm8k", "my/task"])
