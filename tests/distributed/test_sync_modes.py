# SPDX-License-Identifier: Apache-2.0
"""Weights that move while real processes train and generate, and processes that vanish meanwhile.
Numbers are those of the acceptance tests."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from tandem.comm.group import Group, GroupPlace, form_group
from tandem.comm.store import connect_store
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.link import WeightLink, open_link
from tests.distributed.spawn import HOST, fork_until, run_ranks
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.unit.weight_sync.faulty_group import faulty
from tests.unit.weight_sync.layouts import MODES, cut, place, receiving, sending, settings

BESIDE = MODES[1:]
NUM_MESSAGES = 16
NUM_STEPS = 20
"""The last message arrives only after more steps than that: if a transfer held them up, it would
not end."""
TIMEOUT_S = LIMIT_S
"""A lost connection is noticed sooner."""
DELAY_S = 0.02
"""Of each message of a slow network."""


def _three_processes(rank: int, size: int, store_port: int) -> dict[str, Any]:
    """All that is tried with a trainer and two rollouts, so that they are started only once."""
    del size
    children = [
        fork_until(f"begin {rank} {mode}", store_port, partial(_vanish, rank, store_port, mode))
        for mode in (BESIDE if rank in (0, 2) else ())
    ]
    return {
        "overlap": [_overlap(rank, store_port, mode) for mode in BESIDE],
        "trainer": [_lose(rank, store_port, mode, lost=0, children=children) for mode in BESIDE],
        "rollout": [_lose(rank, store_port, mode, lost=2, children=children) for mode in BESIDE],
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What became of it in each process."""
    return run_ranks(_three_processes, 3, joined=False)


def _open(
    rank: int,
    store_port: int,
    mode: dict[str, Any],
    *,
    name: str,
    make_group: Callable[[Store, GroupPlace], Group] = form_group,
) -> tuple[WeightLink, Tensor]:
    """A link over which versions go from rank 0 to two rollouts in ``NUM_MESSAGES``, and this
    process's weights."""
    weight = torch.zeros(64, 16)
    slices = cut({"w": weight}, (1, 1), rank=0)
    link = open_link(
        connect_store(HOST, store_port, timeout_s=LIMIT_S),
        place(rank, 3, name=f"{name} {mode}"),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(256, 256, timeout_s=TIMEOUT_S, **mode),
        make_group=make_group,
    )
    return link, weight


def _forward(link: WeightLink, weight: Tensor) -> int:
    """The version that was read, which is the only one."""
    with link.gate.reading(TIMEOUT_S) as version:
        product = weight @ torch.ones(16)
        assert product.unique().tolist() == [16.0 * version]
    return version


def _overlap(rank: int, store_port: int, mode: dict[str, Any]) -> tuple[int, float]:
    """Version 2 comes over a slow network.

    Returns:
        how often the weights were read or changed meanwhile, and how long it took.
    """
    has_worked = threading.Event()

    def delay(number: int, data: Tensor) -> None:
        del data
        if number >= NUM_MESSAGES:
            time.sleep(DELAY_S)
        if number == 2 * NUM_MESSAGES - 1:
            assert has_worked.wait(TIMEOUT_S), "nothing was done meanwhile"

    goes_on = rank > 0 or mode["staged"]
    slow = faulty(delay) if goes_on else form_group
    link, weight = _open(rank, store_port, mode, name="slow", make_group=slow)
    weight.fill_(1 - rank)
    link.transfer(1)
    if rank == 0:
        weight.fill_(2)
    started = time.monotonic()
    link.begin(2)
    num_steps = 0
    if rank:
        while link.swap() == 1:
            assert _forward(link, weight) == 1
            num_steps += 1
            if num_steps > NUM_STEPS:
                has_worked.set()
        assert _forward(link, weight) == 2
    else:
        while link._background.is_busy:
            weight.fill_(-num_steps)
            num_steps += 1
            if num_steps > NUM_STEPS:
                has_worked.set()
            time.sleep(1e-3)
        link.wait()
    duration_s = time.monotonic() - started
    link.close()
    return num_steps, duration_s


@pytest.mark.parametrize("number", range(len(BESIDE)), ids=[str(mode) for mode in BESIDE])
def test_20_tokens_and_steps_are_made_while_weights_move(
    results: list[dict[str, Any]], number: int
) -> None:
    trainer, *rollouts = (result["overlap"][number] for result in results)
    for num_reads, duration_s in rollouts:
        assert duration_s > NUM_MESSAGES * DELAY_S
        assert num_reads > NUM_STEPS
    num_steps, _ = trainer
    if BESIDE[number]["staged"]:
        assert num_steps > NUM_STEPS
    else:
        assert num_steps == 0, "what is not staged is waited for"


def _lose(
    rank: int, store_port: int, mode: dict[str, Any], *, lost: int, children: Sequence[int]
) -> tuple[str, float]:
    """Rank ``lost`` is killed in the middle of version 2; it is a child of the process that has
    its number.

    Returns:
        what a survivor is told by the next call, and how long that took.
    """
    name = f"without {lost}"
    if rank == lost:
        connect_store(HOST, store_port, timeout_s=LIMIT_S).set(f"begin {rank} {mode}", "")
        os.waitpid(children[BESIDE.index(mode)], 0)
        return "", 0.0
    link, weight = _open(rank, store_port, mode, name=name)
    weight.fill_(1 if rank == 0 else 0)
    link.transfer(1)
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        link.begin(2)
        while rank:  # it generates, and asks for nothing
            assert _forward(link, weight) == 1
            link.check()
        link.wait()
    duration_s = time.monotonic() - started
    for call in (lambda: link.swap(2), lambda: link.begin(3)):
        with pytest.raises(SyncError, match=r"is not coming|has ended"):
            call()
    assert link.gate.version == (1 if rank else None)
    return str(caught.value), duration_s


def _vanish(lost: int, store_port: int, mode: dict[str, Any]) -> None:
    def act(number: int, data: Tensor) -> None:
        del data
        if number == NUM_MESSAGES + 3:
            os.kill(os.getpid(), signal.SIGKILL)

    name = f"without {lost}"
    link, weight = _open(lost, store_port, mode, name=name, make_group=faulty(act))
    weight.fill_(1 if lost == 0 else 0)
    link.transfer(1)
    link.begin(2)
    link.wait()


@pytest.mark.parametrize("number", range(len(BESIDE)), ids=[str(mode) for mode in BESIDE])
@pytest.mark.parametrize(("who", "lost"), [("trainer", 0), ("rollout", 2)])
def test_21_who_dies_while_weights_move_is_named_to_all_others(
    results: list[dict[str, Any]], number: int, who: str, lost: int
) -> None:
    survivors = [result[who][number] for rank, result in enumerate(results) if rank != lost]
    for error, duration_s in survivors:
        assert duration_s < PATIENCE_S
        assert error == survivors[0][0]
        assert error.endswith(f"no answer from rank {lost}")
