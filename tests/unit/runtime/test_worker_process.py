# SPDX-License-Identifier: Apache-2.0
"""The code of a worker process, run by this one."""

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

from tandem.platforms.isolation import CUDA_LIKE, Visibility
from tandem.platforms.place import WorkerPlace
from tandem.platforms.record import CPU, Platform
from tandem.platforms.vendors import MUSA
from tandem.runtime.failure import ReportedError
from tandem.runtime.worker_process import WorkerAssignment, WorkerProcess, interface_variables

PLACE = WorkerPlace("train", 1, 2, node=0, node_address="127.0.0.1")


@pytest.fixture
def clean_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Restore the environment and the log handlers afterwards."""
    handlers = list(logging.getLogger().handlers)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.setenv(name, os.environ.get(name, "0"))
    yield monkeypatch
    logging.getLogger().handlers[:] = handlers


def assignment(visibility: Visibility) -> WorkerAssignment:
    return WorkerAssignment(PLACE, visibility, node_capacity=4, folder=os.getcwd(), num_threads=3)


def confirm(process: WorkerProcess, **facts: Any) -> str:
    platform: Platform = replace(CPU, **facts)
    return process.confirm(pickle.dumps(platform)).value


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
    process = WorkerProcess()
    info = process.isolate(assignment(CUDA_LIKE), ["6"])
    assert (info.place.physical_id, info.place.rank) == ("6", 1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "6"
    assert os.environ["OMP_NUM_THREADS"] == "3"
    assert confirm(process, visibility=CUDA_LIKE) == ""
    process.build(pickle.dumps(listed))
    assert process.call("index", info.place).value == 0


def test_selecting_process_uses_the_device_of_its_index(clean_process: pytest.MonkeyPatch) -> None:
    clean_process.setenv("MUSA_VISIBLE_DEVICES", "4,5,6,7")
    process = WorkerProcess()
    info = process.isolate(assignment(MUSA), ["2"])
    assert (info.place.physical_id, info.place.device_index) == ("6", 2)
    facts = {"visibility": MUSA, "use_device": use_the_third, "device_uuid": "uuid {}".format}
    assert confirm(process, num_devices=partial(int, 4), **facts) == "uuid 2"
    with pytest.raises(ReportedError) as raised:
        confirm(process, num_devices=partial(int, 2), **facts)
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
    process = WorkerProcess()
    process.isolate(assignment(CUDA_LIKE), ["0"])
    with pytest.raises(ReportedError) as raised:
        confirm(process, **facts)
    assert message in raised.value.symptom.cause


@pytest.mark.usefixtures("clean_process")
def test_warnings_travel_with_the_next_reply() -> None:
    process = WorkerProcess()
    process.isolate(replace(assignment(CUDA_LIKE), visibility=CPU.visibility), [])
    confirm(process)
    process.build(pickle.dumps(numbers))
    logging.getLogger("tandem.engines").warning("odd: %d", 7)
    (notice,) = process.call("sort").notices
    assert (notice.source, notice.text) == ("train rank 1", "odd: 7")
    reply = process.call("index", 3)
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
