# SPDX-License-Identifier: Apache-2.0
"""The batch sizes that a step is captured for."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="the kernels need triton")

from tandem.rollout.paged.step import batch_sizes, shares_of_rows


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


@pytest.mark.parametrize(
    ("num_rows", "pages", "expected"),
    [(1, 66, (16, 1)), (24, 6, (5, 1)), (64, 66, (5, 1)), (256, 66, (4, 16)), (1024, 66, (1, 16))],
)
def test_rows_are_divided_until_the_device_is_busy_and_long_ones_further(
    num_rows: int, pages: int, expected: tuple[int, int]
) -> None:
    """Two key/value heads, a device that 264 programs keep busy."""
    assert shares_of_rows(2 * num_rows, pages=pages, busy_programs=264) == expected
