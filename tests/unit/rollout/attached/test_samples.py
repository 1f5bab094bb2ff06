# SPDX-License-Identifier: Apache-2.0
"""The answer of a server to a sample."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.rollout.attached.samples import Sample, read_answer
from tandem.rollout.attached.server import ServerLost
from tandem.rollout.sampler import DrawRule


@pytest.mark.parametrize(
    ("content", "cause"),
    [(None, "TypeError"), ({}, "KeyError('choices')"), ({"choices": []}, "ValueError")],
)
def test_an_answer_of_something_else_is_a_lost_server(content: Any, cause: str) -> None:
    """A proxy may answer a page of HTML with status 200, which is no JSON."""
    sample = Sample(0, (1, 2), key=0, rule=DrawRule(1.0, -1, 1.0), eos_ids=(), length=4)
    with pytest.raises(ServerLost, match="/inference/v1/generate is not vLLM's") as caught:
        read_answer(content, sample)
    assert cause in str(caught.value)
