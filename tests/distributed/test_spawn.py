# SPDX-License-Identifier: Apache-2.0
"""The starter of processes itself: results, failures, deaths and deadlines."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed.spawn import run_ranks

HANG_S = 240


def _behave(rank: int, size: int, store_port: int, ways: tuple[str, ...]) -> torch.Tensor:
    ranks = torch.tensor([rank])
    dist.all_reduce(ranks)
    if ways[rank] == "raise":
        raise ValueError("a cause of its own")
    if ways[rank] == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if ways[rank] == "hang":
        time.sleep(HANG_S)
    return ranks + 10 * rank


def test_each_rank_returns_its_result() -> None:
    assert run_ranks(_behave, 2, ("return", "return")) == [torch.tensor([1]), torch.tensor([11])]


@pytest.mark.parametrize(
    ("way", "message"),
    [("raise", "rank 1 raised\n(.|\n)*a cause of its own"), ("die", "rank 1 died")],
)
def test_a_failure_names_its_rank(way: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(_behave, 2, ("hang", way))


def test_no_wait_is_longer_than_the_deadline() -> None:
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"ranks \[0\] had not finished"):
        run_ranks(_behave, 2, ("hang", "return"), timeout_s=20)
    assert time.monotonic() - began < HANG_S / 2
