# SPDX-License-Identifier: Apache-2.0
"""Which groups routes have, and what users are told of the ways that weights take."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tandem.comm.group import Group, GroupPlace, form_group
from tandem.weight_sync.plan import Route
from tandem.weight_sync.transport import Transport, make_transports
from tandem.weight_sync.transport_choice import Endpoint

CPU = torch.device("cpu")
ROLES = ("trainer 0", "rollout 0", "rollout 1")


@pytest.mark.parametrize(("flagcx", "level"), [("MUSA", logging.WARNING), ("", logging.INFO)])
def test_users_are_warned_where_flagcx_is_passed_over(
    flagcx: str, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    endpoints = [
        Endpoint("npu", "0", "npu", flagcx="NVIDIA"),
        *(Endpoint("musa", f"{n}", "musa", flagcx=flagcx) for n in range(2)),
    ]
    store, route = HashStore(), Route(0, (1, 2))

    # A thread that is done keeps its groups until the last one has formed its own.
    def make(rank: int) -> dict[Route, Transport]:
        def form(name: str, members: tuple[int, ...], **_: object) -> Group:
            return form_group(store, GroupPlace(name, members, rank, CPU, timeout_s=10))

        return make_transports(
            [route],
            endpoints,
            wanted=[None] * 3,
            rank=rank,
            device=CPU,
            roles=ROLES,
            form=form,
        )

    with caplog.at_level(logging.INFO, "tandem.weight_sync"), ThreadPoolExecutor(3) as pool:
        list(pool.map(make, range(3)))
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().startswith("weights go to rollout 0, rollout 1: staged, between npu")


def test_the_two_directions_of_a_pair_do_not_wait_for_each_other() -> None:
    formed: list[tuple[str, tuple[int, ...]]] = []

    def form(name: str, members: tuple[int, ...], **_: object) -> Group:
        formed.append((name, members))
        return form_group(HashStore(), GroupPlace(name, (0,), 0, CPU, timeout_s=10))

    routes = [Route(0, (1,)), Route(1, (0,)), Route(0, (1, 2)), Route(1, (0, 2))]
    make_transports(
        routes,
        [Endpoint("cpu", f"{n}", "cpu") for n in range(3)],
        wanted=[None] * 3,
        rank=0,
        device=CPU,
        roles=ROLES,
        form=form,
    )
    assert [members for _, members in formed] == [(0, 1), (0, 1), (0, 1, 2)]
    assert len({name for name, _ in formed}) == 3
