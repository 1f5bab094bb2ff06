# SPDX-License-Identifier: Apache-2.0
"""The runtime for one process: engine calls run one at a time on one worker thread.

The event loop stays free for signals, rewards and the progress display while an engine computes.
There is no parallelism between engines here by design: they share the device.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from tandem.runtime.os_settings import keep_freed_memory

P = ParamSpec("P")
R = TypeVar("R")


class InProcessRuntime:
    """An implementation of ``tandem.api.Runtime`` without other processes."""

    def __init__(self, prepare_thread: Callable[[], object] | None = None) -> None:
        """Start the engine thread, on which ``prepare_thread`` runs first."""
        keep_freed_memory()
        self._executor = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="engine", initializer=prepare_thread
        )

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``function`` on the engine thread. Calls are executed in the order they were made."""
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, bound)

    async def watch(self) -> None:
        """Wait forever: there is no other process that could end."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Wait for the call in progress, cancel queued calls, and end the thread."""
        await asyncio.to_thread(self._executor.shutdown, wait=True, cancel_futures=True)
