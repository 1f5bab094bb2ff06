# SPDX-License-Identifier: Apache-2.0
"""The order of passes in pipeline stages, and the layers of stages."""

from __future__ import annotations

import pytest

from tandem.config.derived.pools import RankLayout
from tandem.engines.pipeline import one_forward_one_backward


@pytest.mark.parametrize("num_stages", [2, 3, 5])
@pytest.mark.parametrize("num_batches", [0, 1, 2, 4, 9])
def test_mo11_the_schedule_ends_and_keeps_few_micro_batches(
    num_stages: int, num_batches: int
) -> None:
    """Simulate the stages: a pass waits for what it receives; nothing else orders stages."""
    left = [
        list(one_forward_one_backward(rank, num_stages, num_batches=num_batches))
        for rank in range(num_stages)
    ]
    done: set[tuple[int, int, bool]] = set()
    kept = [0] * num_stages
    while any(left):
        ready = [rank for rank, passes in enumerate(left) if passes]
        before = len(done)
        for rank in ready:
            step = left[rank][0]
            needs = (rank - 1 if step.is_forward else rank + 1, step.index, step.is_forward)
            is_end = rank == (0 if step.is_forward else num_stages - 1)
            if is_end and not step.is_forward:
                needs, is_end = (rank, step.index, True), False
            if is_end or needs in done:
                left[rank].pop(0)
                done.add((rank, step.index, step.is_forward))
                kept[rank] += 1 if step.is_forward else -1
                assert 0 <= kept[rank] <= num_stages - rank
        assert len(done) > before, "the stages wait for each other"
    assert len(done) == 2 * num_stages * num_batches
    for rank in range(num_stages):
        backward = [
            step.index
            for step in one_forward_one_backward(rank, num_stages, num_batches=num_batches)
            if not step.is_forward
        ]
        assert backward == list(range(num_batches)), "gradients add up in order"


@pytest.mark.parametrize(
    ("stages", "first", "last", "expected"),
    [
        (1, None, None, [10]),
        (4, None, None, [3, 3, 2, 2]),
        (4, 1, None, [1, 3, 3, 3]),
        (3, None, 4, [3, 3, 4]),
        (3, 2, 3, [2, 5, 3]),
        (2, 7, None, [7, 3]),
    ],
)
def test_the_layers_of_stages(
    stages: int, first: int | None, last: int | None, expected: list[int]
) -> None:
    layout = RankLayout(
        stages,
        tensor_parallel=1,
        sequence_parallel=1,
        num_shards=1,
        pipeline_parallel=stages,
        first_stage_layers=first,
        last_stage_layers=last,
    )
    found = layout.layers_of_stages(10)
    assert list(map(len, found)) == expected
    assert [index for layers in found for index in layers] == list(range(10))
