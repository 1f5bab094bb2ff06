# SPDX-License-Identifier: Apache-2.0
"""Nodes meet over real sockets, all of them on this host."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.runtime import nodes
from tandem.runtime.cluster import ClusterPlan, ClusterSettings
from tandem.runtime.failure import NodeFailure
from tandem.runtime.nodes import HeadServer, MemberClient
from tandem.runtime.token import prove
from tests.fakes.patience import PATIENCE_S, until


def head_plan(wait_s: float = 5) -> ClusterPlan:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    settings = ClusterSettings(num_nodes=3, devices_per_node=1, wait_s=wait_s)
    return ClusterPlan("head", settings, f"127.0.0.1:{port}", "MASTER_ADDR")


TOKEN = "a secret"


def greeted(plan: ClusterPlan, token: str = TOKEN) -> MemberClient:
    client = MemberClient(plan)
    assert client.greet(lambda: token) == token
    return client


def member_plan(plan: ClusterPlan, rank: int) -> ClusterPlan:
    return replace(plan, role="member", node_rank=rank)


def test_members_learn_the_address_and_the_end() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    early = greeted(member_plan(plan, 1))
    server.announce("10.0.0.1:6379")
    assert early.receive() == {"ray": "10.0.0.1:6379"}
    assert server.absent() == [2]
    late = greeted(member_plan(plan, 2))
    assert late.receive() == {"ray": "10.0.0.1:6379"}
    assert server.absent() == []
    server.close(143)
    assert early.receive() == late.receive() == {"exit": 143}
    early.close()
    late.close()


def test_a_member_that_goes_before_the_end_is_named_once() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    first, second = (greeted(member_plan(plan, rank)) for rank in (1, 2))
    until(lambda: server.absent() == [])
    assert server.lost() == ""
    second.close()
    until(server.lost)
    assert server.lost().startswith("node 2 (127.0.0.1) was lost: its command has ended")
    first.close()
    with pytest.raises(NodeFailure, match=r"^node 2 "):
        server.absent()
    server.close(1)


def test_a_member_whose_ray_ends_says_so_at_once_and_hears_the_end() -> None:
    """It stays connected, as the head may end, too, or start the run again."""
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    member = greeted(member_plan(plan, 1))
    until(lambda: server.absent() == [2])
    member.tell_end("its raylet was killed\nby SIGKILL")
    until(server.lost)
    reason = "Ray ended there (its raylet was killed by SIGKILL)"
    assert server.lost() == f"node 1 (127.0.0.1) was lost: {reason}"
    server.close(1)
    assert member.receive() == {"exit": 1}
    member.close()
    member.tell_end("nobody listens")


class RayDouble:
    """A Ray that ends while it starts, or once it has started, or not at all."""

    def __init__(self, *, has_started: bool, end: str) -> None:
        self.has_started, self._end = has_started, end

    def watch_processes(self) -> None:
        """Do nothing."""

    def describe_end(self, *, notice_s: float) -> str:
        del notice_s
        return self._end

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize("has_started", [False, True])
def test_a_ray_of_a_member_that_ends_while_it_starts_is_started_once_more(
    has_started: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = head_plan()
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    server = HeadServer(plan, TOKEN)
    server.announce("10.0.0.1:6379")
    rays = [
        RayDouble(has_started=has_started, end="its raylet is gone"),
        RayDouble(has_started=True, end=""),
    ]
    monkeypatch.setattr(nodes, "RayNode", lambda *_, **__: rays.pop(0))
    codes: list[int] = []

    def join() -> None:
        codes.append(nodes._join(member_plan(plan, 1), (), token_file=tmp_path / "token"))

    member = threading.Thread(target=join)
    member.start()
    if has_started:
        until(lambda: "Ray ended there (its raylet is gone)" in server.lost())
    else:
        until(lambda: not rays)
        assert server.lost() == ""
    server.close(7)
    member.join(PATIENCE_S)
    assert codes == [7]
    assert ("it is started once more" in caplog.text) is not has_started


def test_members_that_are_told_of_the_end_are_not_lost() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    member = greeted(member_plan(plan, 1))
    server.close(0)
    assert member.receive() == {"exit": 0}
    member.close()
    assert server.lost() == ""


def test_second_member_of_one_rank_is_refused() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    server.announce("10.0.0.1:6379")
    first = greeted(member_plan(plan, 1))
    assert first.receive() == {"ray": "10.0.0.1:6379"}
    second = greeted(member_plan(plan, 1))
    with pytest.raises(UserError, match="^NODE_RANK=1: another node .* a rank of its own"):
        second.receive()
    assert server.absent() == [2]
    server.close(0)
    assert first.receive() == {"exit": 0}
    first.close()
    second.close()


def test_run_that_ends_before_it_has_a_cluster_tells_only_its_end() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    member = greeted(member_plan(plan, 1))
    closing = threading.Timer(0.05, server.close, args=(2,))
    closing.start()
    assert member.receive() == {"exit": 2}
    closing.join()
    member.close()


def test_member_may_come_before_the_head() -> None:
    plan = head_plan()
    servers: list[HeadServer] = []
    timer = threading.Timer(0.05, lambda: servers.append(HeadServer(plan, TOKEN)))
    timer.start()
    member = greeted(member_plan(plan, 1))
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


@pytest.mark.parametrize("said", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_stranger_in_place_of_the_head_is_named(said: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        settings = ClusterSettings(num_nodes=2, devices_per_node=1, wait_s=0.2)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        member = MemberClient(ClusterPlan("member", settings, address, "MASTER_ADDR", node_rank=1))
        stranger, _ = server.accept()
        with stranger, pytest.raises(UserError, match=f"no run of tandem answers at {address}, "):
            stranger.sendall(said)
            member.greet(lambda: TOKEN)
    member.close()


def test_head_that_never_comes_is_named() -> None:
    plan = head_plan(wait_s=0.1)
    with pytest.raises(UserError, match="MASTER_ADDR='127.0.0.1': no run answers"):
        MemberClient(member_plan(plan, 1))


def test_taken_port_is_named() -> None:
    plan = head_plan()
    with (
        socket.create_server(plan.host_and_port),
        pytest.raises(UserError, match=f"MASTER_PORT={plan.host_and_port[1]}"),
    ):
        HeadServer(plan, TOKEN)


def test_member_with_another_token_is_refused_and_takes_no_rank() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    server.announce("10.0.0.1:6379")
    with pytest.raises(UserError, match="MASTER_ADDR=.*has another token than this node"):
        greeted(member_plan(plan, 1), "a guess")
    assert server.absent() == [1, 2]
    server.close(0)


def test_member_reads_the_file_again_while_it_shows_the_token_of_an_earlier_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(variable, raising=False)
    plan, file = head_plan(), tmp_path / "token"
    server = HeadServer(plan, TOKEN)
    server.announce("10.0.0.1:6379")
    reads: list[str] = []

    def read(environment: Mapping[str, str], path: Path) -> str:
        reads.append("an old secret" if len(reads) < 2 else TOKEN)
        return reads[-1]

    monkeypatch.setattr(nodes, "member_token", read)
    client, token = nodes.meet_head(member_plan(plan, 1), file)
    assert (token, len(reads)) == (TOKEN, 3)
    assert client.receive() == {"ray": "10.0.0.1:6379"}
    client.close()
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of the user")
    reads.clear()
    with pytest.raises(UserError, match="another token"):
        nodes.meet_head(member_plan(plan, 2), file)
    assert len(reads) == 1, "the user's own token does not change"
    server.close(0)


def test_member_tells_nothing_to_a_head_without_the_token() -> None:
    """A stranger at MASTER_ADDR cannot make a node join a cluster of his."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        plan = replace(member_plan(head_plan(), 1), address=address)
        client = MemberClient(plan)
        connection, _ = server.accept()
        connection.sendall(
            b'{"nonce": "n"}\n{"proof": "' + prove("a guess", ("head",)).encode() + b'"}\n'
        )
        with pytest.raises(UserError, match="another token"):
            client.greet(lambda: TOKEN)
        assert TOKEN.encode() not in connection.recv(1 << 16)
        connection.close()
        client.close()


@pytest.mark.parametrize(
    "words",
    [
        b'{"rank": 1}\n',
        b'{"rank": 1, "nonce": "n", "proof": ""}\n',
        b'{"rank": 1, "nonce": "n", "proof": null}\n',
        b'{"rank": "x", "nonce": "n", "proof": "\xff"}\n',
        b"[]\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"x" * 10_000,
        b"",
    ],
)
def test_strangers_are_cut_off(words: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_HELLO_S", 0.2)
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    server.announce("10.0.0.1:6379")
    with socket.create_connection(plan.host_and_port, timeout=PATIENCE_S) as stranger:
        stranger.sendall(words)
        received = b"".join(iter(lambda: _read(stranger), b""))
    assert b"10.0.0.1" not in received
    assert server.absent() == [1, 2]
    server.close(0)


def _read(connection: socket.socket) -> bytes:
    try:
        return connection.recv(1 << 16)
    except ConnectionError:
        return b""


def test_a_node_may_name_itself_by_a_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "address_here", {"here": "127.0.1.1", "127.0.0.1": "127.0.0.1"}.get)
    assert nodes._address_for_members("here") == ""
    assert nodes._address_for_members("127.0.0.1") == "127.0.0.1"


def test_members_come_back_if_the_run_starts_again_or_the_head_may_be_replaced() -> None:
    plan = head_plan()
    server = HeadServer(plan, TOKEN)
    member = greeted(member_plan(plan, 1))
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
