# SPDX-License-Identifier: Apache-2.0
"""Weights between real processes: every layout, every bucket size, and processes that vanish."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import Store

from tandem.comm.group import Group, GroupPlace, form_group
from tandem.comm.store import connect_store
from tandem.comm.world import WorldPlace, join_world
from tandem.weight_sync.failure import SyncError
from tandem.weight_sync.handshake import LinkTensors
from tandem.weight_sync.link import WeightLink, open_link
from tests.distributed.spawn import HOST, fork_until, run_ranks
from tests.fakes.patience import LIMIT_S, PATIENCE_S
from tests.unit.weight_sync.faulty_group import corrupting, faulty
from tests.unit.weight_sync.layouts import (
    CPU,
    MODES,
    check_arrived,
    constant,
    cut,
    empty_copy,
    make_weights,
    place,
    receiving,
    sending,
    settings,
    tied,
)
from tests.unit.weight_sync.updates import update_often

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class _Case:
    """Trainers on a grid of row and column cuts, and rollouts: as many more processes, or so many
    of the trainers' own. Those are whole, or the parts of an ``engine`` on a grid."""

    grid: tuple[int, int]
    num_rollouts: int
    colocated: bool
    rows: int
    buckets: tuple[int, int]
    mode: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: tuple[int, int] = (1, 1)

    @property
    def num_trainers(self) -> int:
        return self.grid[0] * self.grid[1]

    @property
    def size(self) -> int:
        return self.num_trainers + (0 if self.colocated else self.num_rollouts)


SMALL, LARGE = 50, 30_000
GRIDS = ((1, 1), (2, 1), (2, 2))
CASES = [
    *(
        _Case(grid, num_rollouts, False, SMALL, (KIB, KIB), mode)
        for grid in GRIDS
        for num_rollouts in (1, 2)
        for mode in MODES
    ),
    *(_Case(grid, grid[0] * grid[1], True, SMALL, (KIB, KIB)) for grid in GRIDS),
    *(_Case((2, 1), 2, False, LARGE, (MIB, MIB), mode) for mode in MODES),
    _Case((2, 2), 1, False, LARGE, (64 * MIB, MIB)),
    _Case((2, 1), 2, True, LARGE, (300 * KIB, 64 * MIB)),
    *(_Case((2, 2), 2, False, SMALL, (MIB, 100), mode) for mode in MODES),
    *(
        _Case(grid, 2, False, SMALL, (KIB, KIB), mode, engine)
        for grid, mode in zip([(1, 1), (2, 1), (1, 2), (2, 2)], MODES, strict=True)
        for engine in ((2, 1), (1, 2))
    ),
]


def _run_case(rank: int, store: Store, *, case: _Case, name: str) -> None:
    weights, whole = tied(make_weights(case.rows)), tied(make_weights(case.rows))
    sends = cut(weights, case.grid, rank=rank) if rank < case.num_trainers else []
    first = 0 if case.colocated else case.num_trainers
    receives = first <= rank < first + case.num_rollouts
    part = (rank - first) % math.prod(case.engine)
    rooms = empty_copy(weights, torch.bfloat16, case.engine, rank=part) if receives else []
    whole_sends = cut(whole, case.grid, rank=rank) if sends else []
    link = open_link(
        store,
        place(rank, case.size, name=name),
        tensors=LinkTensors(sends=constant(sends), receives=constant(rooms)),
        settings=settings(*case.buckets, timeout_s=600.0, **case.mode),
    )
    for version in (1, 2, 3):
        for slice_, first_slice in zip(sends, whole_sends, strict=True):
            slice_.tensor.copy_(first_slice.tensor * version)
        assert link.transfer(version).version == version
        assert link.gate.version == (version if receives else None)
        check_arrived(rooms, {key: tensor * version for key, tensor in whole.items()})
    link.close()


def _run_cases(rank: int, size: int, store_port: int) -> str:
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    for number, case in enumerate(CASES):
        if rank < case.size:
            _run_case(rank, store, case=case, name=f"link {number}")
    # Groups across pools beside the default world of each pool.
    pool, first = ("train", 0) if rank < 4 else ("rollout", 4)
    num_ranks = 4 if pool == "train" else size - 4
    join_world(store, WorldPlace(pool, rank - first, num_ranks, CPU, "gloo", timeout_s=LIMIT_S))
    ranks = torch.tensor([rank])
    distributed.all_reduce(ranks)
    _run_case(rank, store, case=_Case((2, 2), 2, False, SMALL, (KIB, KIB)), name="last")
    distributed.destroy_process_group()
    return f"{pool} {int(ranks)}"


def test_16_every_tensor_arrives_bit_by_bit_in_every_layout_and_mode() -> None:
    expected = ["train 6"] * 4 + ["rollout 9"] * 2
    assert run_ranks(_run_cases, 6, joined=False) == expected


def _three_processes(rank: int, size: int, store_port: int) -> dict[str, Any]:
    """All that is tried with a trainer and two rollouts, so that they are started only once."""
    ways = (signal.SIGKILL, signal.SIGSTOP)
    killed, stopped = [
        fork_until(f"{way.name}/begin", store_port, partial(_vanish, store_port, way))
        if rank == 2
        else 0
        for way in ways
    ]
    store = connect_store(HOST, store_port, timeout_s=LIMIT_S)
    return {
        "mistakes": _make_mistakes(rank, size, store),
        "killed": _lose_a_process(rank, store_port, signal.SIGKILL, child=killed),
        "stopped": _lose_a_process(rank, store_port, signal.SIGSTOP, child=stopped),
        "updates": _update(rank, store) if rank < 2 else [],
    }


@pytest.fixture(scope="module")
def results() -> list[dict[str, Any]]:
    """What became of it in each process."""
    return run_ranks(_three_processes, 3, joined=False)


def _make_mistakes(rank: int, size: int, store: Store) -> list[str]:
    """What a process says of links in which something is wrong."""
    weights = make_weights()
    errors: list[str] = []

    def attempt(name: str, rooms: dict[str, torch.Tensor], corrupt: tuple[int, ...] = ()) -> None:
        slices = empty_copy(rooms, torch.bfloat16) if rank else cut(weights, (1, 1), rank=0)
        with pytest.raises(SyncError) as caught:
            open_link(
                store,
                place(rank, size, name=name),
                tensors=receiving(slices) if rank else sending(slices),
                settings=settings(KIB, KIB),
                make_group=corrupting(corrupt),
            ).transfer(1)
        errors.append(str(caught.value))

    attempt("a corrupt bucket", weights, corrupt=(3,) if rank == 2 else ())
    attempt("a missing tensor", weights | ({"more": torch.zeros(3)} if rank == 1 else {}))
    attempt("a wrong shape", weights | ({"head": torch.zeros(9, 9)} if rank == 2 else {}))
    return errors


def test_a12_mistakes_are_named_in_all_processes(results: list[dict[str, Any]]) -> None:
    first, *others = (result["mistakes"] for result in results)
    assert others == [first, first]
    corrupt, missing, shape = first
    assert corrupt.startswith("embed: [30:40, 0:48] arrived corrupt, from process 0 (rank 0 of")
    assert "at process 2 (rank 2 of" in corrupt
    assert missing == "more: rank 1 needs it and no rank holds it"
    assert shape == "head: its shape is (17, 9) in rank 0 and (9, 9) in rank 2"


TIMEOUTS_S = {"SIGSTOP": 8.0}
"""By the names of links: a lost connection is noticed long before the limit of other links; a
process that is only stopped is not."""
NUM_MESSAGES = 16


def _open(
    rank: int,
    store_port: int,
    *,
    name: str,
    make_group: Callable[[Store, GroupPlace], Group] = form_group,
) -> WeightLink:
    """A link of a trainer and two rollouts; a transfer takes ``NUM_MESSAGES``."""
    slices = cut({"w": torch.ones(64, 16)}, (1, 1), rank=0)
    return open_link(
        connect_store(HOST, store_port, timeout_s=LIMIT_S),
        place(rank, 3, name=name),
        tensors=receiving(slices) if rank else sending(slices),
        settings=settings(256, 256, timeout_s=TIMEOUTS_S.get(name, LIMIT_S)),
        make_group=make_group,
    )


def _lose_a_process(
    rank: int, store_port: int, lost_by: signal.Signals, *, child: int
) -> tuple[str, float]:
    """Ranks 0 and 1 lose rank 2, a child of the process that then takes its place.

    Returns:
        what the survivors say, and how long it took them.
    """
    name = lost_by.name
    if rank == 2:
        connect_store(HOST, store_port, timeout_s=LIMIT_S).set(f"{name}/begin", "")
        os.waitpid(child, os.WUNTRACED)
        replacement = _open_when_asked(store_port, name=name)
        replacement.transfer(3)
        assert replacement.gate.version == 3
        if lost_by == signal.SIGSTOP:
            os.kill(child, signal.SIGKILL)
        return "", 0.0
    link = _open(rank, store_port, name=name)
    link.transfer(1)
    started = time.monotonic()
    with pytest.raises(SyncError) as caught:
        link.transfer(2)
    duration_s = time.monotonic() - started
    assert link.gate.version is None
    with pytest.raises(SyncError, match=f"link {name} has ended"):
        link.transfer(2)
    connect_store(HOST, store_port, timeout_s=LIMIT_S).set(f"{name}/replace", "")
    successor = _open(rank, store_port, name=f"{name} again")
    successor.transfer(3)
    assert successor.gate.version == (3 if rank else None)
    return str(caught.value), duration_s


def _vanish(store_port: int, lost_by: signal.Signals) -> None:
    """A rollout that gets a signal when a part of the second version has come."""

    def act(number: int, bucket: torch.Tensor) -> None:
        del bucket
        if number == NUM_MESSAGES + 3:
            os.kill(os.getpid(), lost_by)

    link = _open(2, store_port, name=lost_by.name, make_group=faulty(act))
    link.transfer(1)
    link.transfer(2)


def _open_when_asked(store_port: int, *, name: str) -> WeightLink:
    connect_store(HOST, store_port, timeout_s=LIMIT_S).wait([f"{name}/replace"])
    return _open(2, store_port, name=f"{name} again")


@pytest.mark.parametrize(
    ("way", "cause"),
    [
        ("killed", "[Cc]onnection|[Bb]roken pipe|[Ss]ocket closed"),
        # The first whose time is up closes its connections, which the other may notice sooner.
        ("stopped", "not all took part|[Tt]imed ?out|timeout|[Cc]onnection|[Bb]roken pipe"),
    ],
)
def test_a12_a_lost_process_ends_the_transfer_everywhere_and_can_be_replaced(
    results: list[dict[str, Any]], way: str, cause: str
) -> None:
    survivors = [result[way] for result in results[:2]]
    for error, duration_s in survivors:
        assert duration_s < PATIENCE_S
        assert error == survivors[0][0]
        assert re.search(cause, error)
        assert error.endswith("no answer from rank 2")


def _update(rank: int, store: Store) -> list[int]:
    """How many versions each reader met, in every mode."""
    met: list[int] = []
    for mode in MODES:
        versions = update_often(
            store,
            place(rank, 2, name=f"mode {mode}"),
            settings=settings(512, 512, **mode),
            num_updates=1000,
        )
        met += map(len, versions)
    return met


def test_17_a_thousand_updates_in_every_mode_and_no_reader_sees_two_versions(
    results: list[dict[str, Any]],
) -> None:
    met = results[1]["updates"]
    assert len(met) == 2 * len(MODES)
    assert min(met) > 50, "readers met many versions"
