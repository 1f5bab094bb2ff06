# SPDX-License-Identifier: Apache-2.0
"""Nodes meet over real sockets, all of them on this host."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace

import pytest

from tandem.errors import UserError
from tandem.runtime.cluster import ClusterPlan, ClusterSettings
from tandem.runtime.failure import NodeFailure
from tandem.runtime.nodes import HeadServer, MemberClient


def head_plan(wait_s: float = 5) -> ClusterPlan:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = ClusterSettings(num_nodes=3, devices_per_node=1, wait_s=wait_s)
    return ClusterPlan("head", settings, f"127.0.0.1:{port}", "MASTER_ADDR")


def member_plan(plan: ClusterPlan, rank: int) -> ClusterPlan:
    return replace(plan, role="member", node_rank=rank)


def test_members_learn_the_address_and_the_end() -> None:
    plan = head_plan()
    server = HeadServer(plan)
    early = MemberClient(member_plan(plan, 1))
    server.announce("10.0.0.1:6379")
    assert early.receive() == {"ray": "10.0.0.1:6379"}
    assert server.absent() == [2]
    late = MemberClient(member_plan(plan, 2))
    assert late.receive() == {"ray": "10.0.0.1:6379"}
    assert server.absent() == []
    server.close(143)
    assert early.receive() == late.receive() == {"exit": 143}
    early.close()
    late.close()


def test_second_member_of_one_rank_is_refused() -> None:
    plan = head_plan()
    server = HeadServer(plan)
    server.announce("10.0.0.1:6379")
    first = MemberClient(member_plan(plan, 1))
    assert first.receive() == {"ray": "10.0.0.1:6379"}
    second = MemberClient(member_plan(plan, 1))
    with pytest.raises(UserError, match="^NODE_RANK=1: another node .* a rank of its own"):
        second.receive()
    assert server.absent() == [2]
    server.close(0)
    assert first.receive() == {"exit": 0}
    first.close()
    second.close()


def test_run_that_ends_before_it_has_a_cluster_tells_only_its_end() -> None:
    plan = head_plan()
    server = HeadServer(plan)
    member = MemberClient(member_plan(plan, 1))
    closing = threading.Timer(0.05, server.close, args=(2,))
    closing.start()
    assert member.receive() == {"exit": 2}
    closing.join()
    member.close()


def test_member_may_come_before_the_head() -> None:
    plan = head_plan()
    servers: list[HeadServer] = []
    timer = threading.Timer(0.05, lambda: servers.append(HeadServer(plan)))
    timer.start()
    member = MemberClient(member_plan(plan, 1))
    timer.join()
    servers[0].close(0)
    assert member.receive() == {"exit": 0}
    member.close()


def test_head_that_vanishes_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = ClusterSettings(num_nodes=2, devices_per_node=1, wait_s=5)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        member = MemberClient(ClusterPlan("member", settings, address, "MASTER_ADDR", node_rank=1))
        server.accept()[0].close()
    with pytest.raises(NodeFailure, match=f"the first node .{address}. vanished"):
        member.receive()
    member.close()


def test_head_that_never_comes_is_named() -> None:
    plan = head_plan(wait_s=0.1)
    with pytest.raises(UserError, match="MASTER_ADDR='127.0.0.1': no run answers"):
        MemberClient(member_plan(plan, 1))


def test_taken_port_is_named() -> None:
    plan = head_plan()
    with (
        socket.create_server(("", plan.host_and_port[1])),
        pytest.raises(UserError, match=f"MASTER_PORT={plan.host_and_port[1]}"),
    ):
        HeadServer(plan)


def test_members_come_back_if_the_run_starts_again_or_the_head_may_be_replaced() -> None:
    plan = head_plan()
    server = HeadServer(plan)
    member = MemberClient(member_plan(plan, 1))
    server.close(1, again=True)
    assert member.receive() == {"exit": 1, "again": True}
    member.close()
    for restarts in (False, True):
        settings = replace(plan.settings, restarts=restarts)
        with socket.create_server(plan.host_and_port) as vanishing:
            member = MemberClient(replace(member_plan(plan, 1), settings=settings))
            vanishing.accept()[0].close()
        with pytest.raises(NodeFailure, match="vanished") as failure:
            member.receive()
        assert failure.value.restarts_elsewhere == restarts
        member.close()
