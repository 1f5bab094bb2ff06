# SPDX-License-Identifier: Apache-2.0
"""Positions, segments and passes of packed runs."""

from __future__ import annotations

import pytest
import torch

from tandem.rollout.packing import cost_of, in_passes, pack


def test_runs_stand_behind_each_other_and_know_what_is_before_them() -> None:
    packed = pack(
        [(7, 8, 9), (5,), (3, 4)],
        [0, 6, 2],
        prefix_starts=[0, 2, 0],
        device=torch.device("cpu"),
    )
    assert packed.token_T.tolist() == [7, 8, 9, 5, 3, 4]
    assert packed.position_T.tolist() == [0, 1, 2, 6, 2, 3]
    assert packed.last_S.tolist() == [2, 3, 5]
    segments = packed.segments
    assert segments.start_S.tolist() == [0, 3, 4]
    assert segments.length_S.tolist() == [3, 1, 2]
    assert segments.prefix_length_S.tolist() == [0, 6, 2]
    assert segments.prefix_start_S.tolist()[1:] == [8, 6]  # behind the six keys of the pass


@pytest.mark.parametrize(
    ("costs", "stops"),
    [([], []), ([3, 4, 9, 2], [2, 3, 4]), ([7, 1], [1, 2]), ([9, 9], [1, 2]), ([2, 2, 3], [3])],
)
def test_passes_keep_the_budget_and_what_costs_more_stands_alone(
    costs: list[int], stops: list[int]
) -> None:
    passes = in_passes(costs, 7)
    assert [chosen.stop for chosen in passes] == stops
    assert [chosen.start for chosen in passes] == [0, *stops[:-1]][: len(stops)]


def test_a_short_run_behind_a_long_prompt_costs_a_quarter_of_its_keys() -> None:
    assert [cost_of(250, 256), cost_of(1, 1023), cost_of(5, 0)] == [250, 256, 5]
