# SPDX-License-Identifier: Apache-2.0
"""Completions: which version drew which token, also in another process."""

from __future__ import annotations

import pickle
from array import array

import pytest

from tandem.types import Completion, FinishReason


@pytest.mark.parametrize(
    ("switches", "runs"),
    [
        ((), ((3, 5),)),
        (((2, 4),), ((3, 2), (4, 3))),
        (((1, 4), (4, 7)), ((3, 1), (4, 3), (7, 1))),
    ],
)
def test_version_runs_cover_the_tokens(
    switches: tuple[tuple[int, int], ...], runs: tuple[tuple[int, int], ...]
) -> None:
    tokens, log_probs = array("i", [1, 2, 3, 4, 5]), array("f", [-0.5] * 5)
    completion = Completion(1, tokens, log_probs, FinishReason.STOP, 3, switches)
    assert completion.version_runs == runs
    assert pickle.loads(pickle.dumps(completion)) == completion
