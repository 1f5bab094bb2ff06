# SPDX-License-Identifier: Apache-2.0
"""The wait for a cluster and a Ray that does not start, without either."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest
import ray

from tandem.errors import RunFailure
from tandem.runtime import ray_cluster
from tandem.runtime.cluster import ClusterPlan, ClusterSettings
from tandem.runtime.ray_cluster import interruptible, start_ray
from tandem.runtime.ray_node import RayNodeError
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
    ("printed", "named"), [("", "RayNodeError('')"), ("Timed out.\n", "Timed out")]
)
def test_a_ray_that_does_not_start_is_one_line(
    monkeypatch: pytest.MonkeyPatch, printed: str, named: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RayNodeError(printed)

    monkeypatch.setattr(ray_cluster, "start_head", fail)
    with pytest.raises(RunFailure) as raised:
        start_ray(ray, ClusterPlan("local", ClusterSettings(1, 2)), devices=list, token="")
    expected = f"Ray did not start on this node ({named}). If the machine is busy, try again"
    assert str(raised.value) == expected
