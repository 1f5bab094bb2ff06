# SPDX-License-Identifier: Apache-2.0
"""Completions: which version drew which token, also in another process."""

from __future__ import annotations

import pickle
from array import array

import pytest

from tandem.types import Completion, FinishReason, Span, Trajectory


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


def drawn(*ids: int) -> Span:
    completion = Completion(4, array("i", ids), [-1.0] * len(ids), FinishReason.STOP, 0)
    return Span(completion.token_ids, completion)


def test_a_single_turn_is_a_given_and_a_drawn_span() -> None:
    completion = Completion(4, array("i", [3, 4]), [-1.0] * 2, FinishReason.STOP, 0)
    trajectory = Trajectory.of_single_turn((1, 2), completion)
    assert trajectory == Trajectory(4, (Span((1, 2)), Span(completion.token_ids, completion)))
    assert trajectory.completions == (completion,)
    assert trajectory.response_ids is completion.token_ids, "nothing is copied"
    assert (trajectory.prompt_ids, trajectory.loss_mask) == ((1, 2), None)


def test_given_tokens_between_drawn_ones_belong_to_the_response_without_loss() -> None:
    trajectory = Trajectory(4, (Span((1,)), Span((2,)), drawn(3, 4), Span((5,)), drawn(6), drawn()))
    assert list(trajectory.prompt_ids) == [1, 2]
    assert list(trajectory.response_ids) == [3, 4, 5, 6]
    assert trajectory.loss_mask == (True, True, False, True)
    assert trajectory.num_drawn_tokens == 3 and len(trajectory.completions) == 3


@pytest.mark.parametrize("spans", [(), (drawn(1),), (drawn(1), Span((2,))), (Span((1,)),)])
def test_a_trajectory_begins_with_given_tokens_and_has_drawn_ones(spans: tuple[Span, ...]) -> None:
    with pytest.raises(ValueError, match="sample 4: the first span must be given"):
        Trajectory(4, spans)
