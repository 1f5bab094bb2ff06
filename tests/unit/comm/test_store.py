# SPDX-License-Identifier: Apache-2.0
"""The store and the bounds of waits on it."""

from __future__ import annotations

import socket
import time
from dataclasses import replace

import pytest

from tandem.comm.deadline import Deadline, GroupError, report_failure
from tandem.comm.store import connect_store, host_store, share_port
from tandem.errors import UserError


def test_a12_clients_meet_at_the_hosted_store_and_nobody_else_gets_its_port() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    server = hosted.server
    first, second = (connect_store("127.0.0.1", server.port, timeout_s=5) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", server.port))


def test_a_store_listens_at_its_address_only() -> None:
    hosted = host_store("127.0.0.2", timeout_s=5)
    port = hosted.place.port
    for stranger in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((stranger, port), timeout=5)
    hosted.place.connect(timeout_s=5).set("key", "value")


def test_runs_meet_nobody_in_the_store_of_another() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    first, second = (hosted.place.connect(timeout_s=5) for _ in range(2))
    first.set("key", "value")
    assert second.get("key") == b"value"
    other = replace(hosted.place, prefix=host_store("127.0.0.1", timeout_s=5).place.prefix)
    assert not other.connect(timeout_s=5).check(["key"])
    assert not hosted.server.check(["key"])


def test_an_address_of_another_host_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"store='192\.0\.2\.1': the driver cannot listen"):
        host_store("192.0.2.1", timeout_s=5)


def test_hosts_agree_on_a_port_for_all_starts_of_a_run() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    server = hosted.server
    where = ("127.0.0.1", server.port)
    for _ in range(2):
        first = share_port(*where, key="port", is_first=True, timeout_s=5)
        other = share_port(*where, key="port", is_first=False, timeout_s=5)
        assert first == other == int(server.get("port"))


def test_a_store_that_cannot_be_reached_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match=r"store='127\.0\.0\.1:1': cannot be reached within 0\.2 s"):
        connect_store("127.0.0.1", 1, timeout_s=0.2)


def test_a_deadline_passes() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    server = hosted.server
    deadline = Deadline(1.0, store=server, key="failure")
    deadline.check()
    time.sleep(1.01)
    with pytest.raises(GroupError, match=r"not all took part within 1 s"):
        deadline.check()


def test_the_first_reported_failure_ends_all_waits() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    server = hosted.server
    client = connect_store("127.0.0.1", server.port, timeout_s=5)
    deadline = Deadline(5, store=client, key="failure")
    assert report_failure(server, "failure", cause="rank 1 fell over") == "rank 1 fell over"
    assert report_failure(client, "failure", cause="rank 2 saw it") == "rank 1 fell over"
    time.sleep(0.11)
    with pytest.raises(GroupError, match="rank 1 fell over"):
        deadline.check()


def test_a_store_that_went_away_ends_waits_too() -> None:
    hosted = host_store("127.0.0.1", timeout_s=5)
    server = hosted.server
    client = connect_store("127.0.0.1", server.port, timeout_s=1)
    deadline = Deadline(5, store=client, key="failure")
    del server, hosted
    time.sleep(0.11)
    with pytest.raises(GroupError, match="the driver's store is gone"):
        deadline.check()
    assert report_failure(client, "failure", cause="mine") == "mine"
