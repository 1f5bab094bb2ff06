# SPDX-License-Identifier: Apache-2.0
"""How processes that divide experts share the requests that all of them get."""

from __future__ import annotations

import pytest

from tandem.rollout.divided import deal
from tandem.types import GenerationRequest, SamplingParams

SAMPLING = SamplingParams(temperature=1.0, top_p=1.0, top_k=-1, max_new_tokens=8)


def request(*sample_ids: int) -> GenerationRequest:
    return GenerationRequest(sample_ids, (1, 2), SAMPLING)


@pytest.mark.parametrize(
    ("requests", "loads", "dealt"),
    [
        # A prompt is computed once for its samples where there are enough prompts.
        ([(0, 1, 2), (3,), (4,)], [0, 0], [[(0, 1, 2)], [(3,), (4,)]]),
        # Who has more to do gets less.
        ([(0,), (1,), (2,)], [2, 0], [[(2,)], [(0,), (1,)]]),
        # Fewer requests than processes are divided.
        ([(0, 1, 2, 3, 4)], [0, 0, 0], [[(0, 1)], [(2, 3)], [(4,)]]),
        ([(0,)], [0, 0], [[(0,)], []]),
        ([], [1, 0], [[], []]),
    ],
)
def test_each_sample_goes_to_one_process(requests, loads, dealt):
    found = deal([request(*ids) for ids in requests], loads)
    assert [[one.sample_ids for one in own] for own in found] == dealt
