# SPDX-License-Identifier: Apache-2.0
"""The wait for a cluster, without one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from tandem.runtime.ray_cluster import interruptible
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
