# SPDX-License-Identifier: Apache-2.0
"""What can be told of getting hold of a cluster without one."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import pytest

from tandem.runtime.attach import interruptible


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
        started_s = time.monotonic()
        with pytest.raises(error), interruptible():
            time.sleep(10)
        assert time.monotonic() - started_s < 5
        os.kill(os.getpid(), number)
        await asyncio.sleep(0.02)

    asyncio.run(block())
    assert noted == [number], "afterwards it is the loop's matter again"
