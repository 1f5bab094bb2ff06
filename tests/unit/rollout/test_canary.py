# SPDX-License-Identifier: Apache-2.0
"""Log-probs of known tokens that differ from the trainer's."""

from __future__ import annotations

import pytest
import torch

from tandem.api import EngineFailure
from tandem.rollout.canary import NUM_TOKENS, canary_tokens, require_equal

DTYPES = (torch.float32, torch.float32)


def require(found: list[float]) -> None:
    expected_R = torch.full((NUM_TOKENS,), -1.0)
    require_equal(expected_R, torch.tensor(found), engine="E", version=2, dtypes=DTYPES)


def test_equal_log_probs_pass_and_others_do_not() -> None:
    require([-1.0] * NUM_TOKENS)
    for wrong in (-1.1, float("nan")):
        with pytest.raises(EngineFailure, match="version 2 was not loaded as the trainer has it"):
            require([-1.0] * (NUM_TOKENS - 1) + [wrong])


@pytest.mark.parametrize("num_tokens", [0, 1, NUM_TOKENS - 1])
def test_another_number_of_tokens_is_a_failure_of_the_engine(num_tokens: int) -> None:
    with pytest.raises(EngineFailure, match=f"of 8 known tokens, {num_tokens} came back"):
        require([-1.0] * num_tokens)


def test_versions_have_one_prompt_and_tokens_of_their_own() -> None:
    versions = [canary_tokens(96, version) for version in range(3)]
    assert len({prompt for prompt, _ in versions}) == 1
    assert len({later for _, later in versions}) == 3
    for prompt, later in versions:
        assert len(prompt) == len(later) == NUM_TOKENS
        assert max(*prompt, *later) < 96
