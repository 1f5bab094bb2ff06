# SPDX-License-Identifier: Apache-2.0
"""The batch sizes that a step is captured for."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.rollout.paged.step import batch_sizes


@pytest.mark.parametrize("max_rows", [1, 2, 3, 8, 9, 16, 100, 128, 1000, 1024])
def test_sizes_rise_to_the_number_of_rows(max_rows: int) -> None:
    sizes = batch_sizes(max_rows)
    assert sizes[-1] == max_rows
    assert all(a < b for a, b in itertools.pairwise([0, *sizes]))


def test_few_rows_are_rounded_up_little_and_many_by_an_eighth() -> None:
    sizes = batch_sizes(1024)
    assert sizes[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert len(sizes) < 60
    for smaller, larger in itertools.pairwise(sizes):
        assert larger - smaller <= max(8, smaller // 8)
