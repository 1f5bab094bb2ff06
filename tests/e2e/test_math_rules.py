# SPDX-License-Identifier: Apache-2.0
"""The rules of mathematics on 10,000 generated answers, of which the truth is known."""

from __future__ import annotations

import pytest

from tests.fakes.answer_forms import draw_responses
from tests.unit.rewards.test_math_answer import misjudged

NUM_RESPONSES = 10_000


@pytest.mark.slow
def test_the_rules_judge_10000_answers_as_a_person_does():
    wrong = misjudged(list(draw_responses(seed=1, count=NUM_RESPONSES)))
    assert not wrong, f"{len(wrong)} of {NUM_RESPONSES}, such as {wrong[:3]}"
