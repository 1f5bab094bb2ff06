# SPDX-License-Identifier: Apache-2.0
"""What can be told of getting hold of a cluster without one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tandem.runtime.cluster import ClusterSettings, plan_cluster
from tandem.runtime.ray_cluster import interruptible, start_ray
from tests.fakes.patience import LIMIT_S, sooner_than


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_signals_end_what_blocks_the_main_thread_of_an_event_loop(
    number: int, error: type[BaseException]
) -> None:
    noted: list[int] = []

    async def block() -> None:
        asyncio.get_running_loop().add_signal_handler(number, noted.append, number)
        threading.Timer(0.05, os.kill, (os.getpid(), number)).start()
        with sooner_than(), pytest.raises(error), interruptible():
            time.sleep(LIMIT_S)
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)

    asyncio.run(block())
    assert noted == [number], "afterwards it is the loop's matter again"


@pytest.mark.parametrize(
    ("asked_for", "expected"),
    [
        ({}, []),
        ({"include_dashboard": True}, ["dashboard"]),
        ({"log_to_driver": True}, ["log monitor"]),
    ],
)
def test_ray_starts_no_process_that_nobody_has_asked_for(
    asked_for: dict[str, Any], expected: list[str]
) -> None:
    started: list[str] = []

    class Node:
        """In the place of Ray's."""

        def start_monitor(self) -> None:
            started.append("autoscaler")

        def start_log_monitor(self) -> None:
            started.append("log monitor")

        def start_api_server(self, *, include_dashboard: bool) -> None:
            started.append("dashboard")

    def init(**_: Any) -> None:
        node = Node()
        node.start_monitor()
        node.start_api_server(include_dashboard=False)
        node.start_log_monitor()

    private = SimpleNamespace(node=SimpleNamespace(Node=Node))
    ray: Any = SimpleNamespace(init=init, _private=private)
    plan = plan_cluster(ClusterSettings(1, 1, ray_init=asked_for), {})
    start_ray(ray, plan, devices=lambda: [])
    assert started == expected
    init()
    assert started == [*expected, "autoscaler", "dashboard", "log monitor"], "all is as before"
