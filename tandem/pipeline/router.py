# SPDX-License-Identifier: Apache-2.0
"""Drives a rollout engine and hands each finished group to whoever asked for it.

The engine is a state machine (add, advance); this is the only place that advances it. Training and
validation requests go through the same router and meet in the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.api import RolloutEngine, Runtime
from tandem.types import Completion, GenerationRequest


@dataclass(slots=True)
class _Pending:
    """A request whose completions are being gathered."""

    request: GenerationRequest
    future: asyncio.Future[tuple[Completion, ...]]
    finished: dict[int, Completion] = field(default_factory=dict[int, Completion])


class RolloutRouter:
    """Consumes: requests. Waits for: work. Unblocked by: ``submit``. Produces: completions of whole
    groups.
    """

    def __init__(
        self, engine: RolloutEngine, runtime: Runtime, *, clock: Callable[[], float]
    ) -> None:
        self._engine = engine
        self._runtime = runtime
        self._clock = clock
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[GenerationRequest] = []
        self._has_work = asyncio.Event()
        self.last_finish_s = clock()
        """When the latest completion arrived."""

    def submit(
        self, requests: Sequence[GenerationRequest]
    ) -> list[asyncio.Future[tuple[Completion, ...]]]:
        """Queue requests, together; each future yields the completions in the order of
        ``sample_ids``.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[tuple[Completion, ...]]] = []
        for request in requests:
            pending = _Pending(request, loop.create_future())
            self._pending.update(dict.fromkeys(request.sample_ids, pending))
            futures.append(pending.future)
        self._unsent.extend(requests)
        self._has_work.set()
        return futures

    async def run(self) -> None:
        """Advance the engine as long as there is work; ends only by cancellation."""
        while True:
            await self._has_work.wait()
            if self._unsent:
                requests, self._unsent = self._unsent, []
                await self._runtime.call(self._engine.add, requests)
            self._deliver(await self._runtime.call(self._engine.advance))
            if not self._pending:
                self._has_work.clear()

    def _deliver(self, completions: Sequence[Completion]) -> None:
        if not completions and not self._unsent:
            raise RuntimeError(f"the rollout engine lost {len(self._pending)} of its sequences")
        self.last_finish_s = self._clock()
        for completion in completions:
            pending = self._pending.pop(completion.sample_id)
            pending.finished[completion.sample_id] = completion
            ids = pending.request.sample_ids
            if len(pending.finished) == len(ids) and not pending.future.cancelled():
                pending.future.set_result(tuple(pending.finished[i] for i in ids))
