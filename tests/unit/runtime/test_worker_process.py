# SPDX-License-Identifier: Apache-2.0
"""What a worker process does with itself, done by this one."""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import psutil
import pytest

from tandem.platforms.isolation import CUDA_LIKE, MUSA, Visibility
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CPU, Platform
from tandem.runtime.failure import ReportedError
from tandem.runtime.worker_process import HostedObject, Seat, interface_variables

PLACE = WorkerPlace("train", 1, 2, node=0, node_address="127.0.0.1", local_rank=1, local_size=2)


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Environment and log handlers are as before afterwards."""
    handlers = list(logging.getLogger().handlers)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    yield monkeypatch
    logging.getLogger().handlers[:] = handlers


def seat(visibility: Visibility) -> Seat:
    return Seat(PLACE, visibility, node_capacity=4, folder=os.getcwd(), num_threads=3)


def confirm(hosted: HostedObject, **facts: Any) -> str:
    platform: Platform = replace(CPU, **facts)
    return hosted.confirm(pickle.dumps(platform)).value


def listed(place: WorkerPlace) -> list[WorkerPlace]:
    return [place]


def numbers(place: WorkerPlace) -> list[int]:
    return [3, 1]


def use_the_third(index: int) -> None:
    assert index == 2, index


def test_process_is_isolated_before_its_object_is_made(
    clean_process: pytest.MonkeyPatch,
) -> None:
    clean_process.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    hosted = HostedObject()
    opened = hosted.open(seat(CUDA_LIKE), ["6"])
    assert (opened.place.physical_id, opened.place.rank) == ("6", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert confirm(hosted, visibility=CUDA_LIKE) == ""
    hosted.build(pickle.dumps(listed))
    assert hosted.call("index", opened.place).value == 0


def test_selecting_process_uses_the_device_of_its_index(clean_process: pytest.MonkeyPatch) -> None:
    clean_process.setenv("MUSA_VISIBLE_DEVICES", "4,5,6,7")
    hosted = HostedObject()
    opened = hosted.open(seat(MUSA), ["2"])
    assert (opened.place.physical_id, opened.place.device_index) == ("6", 2)
    facts = {"visibility": MUSA, "use_device": use_the_third, "device_uuid": "uuid {}".format}
    assert confirm(hosted, num_devices=partial(int, 4), **facts) == "uuid 2"
    with pytest.raises(ReportedError) as raised:
        confirm(hosted, num_devices=partial(int, 2), **facts)
    assert "shows 2 devices here" in raised.value.symptom.cause


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        (
            {"num_devices": partial(int, 2)},
            "cpu shows 2 devices here, against: CUDA_VISIBLE_DEVICES=0",
        ),
        ({"num_devices": partial(int, 0)}, "cpu shows 0 devices here"),
        (
            {"probe": partial(str, "finds no device")},
            "platform=cpu: train rank 1 cannot use it on ",
        ),
    ],
)
def test_isolation_without_effect_ends_the_worker(
    clean_process: pytest.MonkeyPatch, facts: dict[str, Any], message: str
) -> None:
    clean_process.setenv("CUDA_VISIBLE_DEVICES", "0")
    hosted = HostedObject()
    hosted.open(seat(CUDA_LIKE), ["0"])
    with pytest.raises(ReportedError) as raised:
        confirm(hosted, **facts)
    assert message in raised.value.symptom.cause


@pytest.mark.usefixtures("clean_process")
def test_warnings_travel_with_the_next_reply() -> None:
    hosted = HostedObject()
    hosted.open(replace(seat(CUDA_LIKE), visibility=CPU.visibility), [])
    confirm(hosted)
    hosted.build(pickle.dumps(numbers))
    logging.getLogger("tandem.engines").warning("odd: %d", 7)
    (notice,) = hosted.call("sort").notices
    assert (notice.source, notice.text) == ("train rank 1", "odd: 7")
    reply = hosted.call("index", 3)
    assert (reply.value, reply.notices) == (1, ())


def test_collectives_are_told_the_network_that_other_nodes_use() -> None:
    named = {
        entry.address: interface
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    }
    for address, interface in named.items():
        variables = interface_variables(address)
        assert variables == {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    assert interface_variables("127.0.0.1") == interface_variables("203.0.113.9") == {}
