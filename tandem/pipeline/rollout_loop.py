# SPDX-License-Identifier: Apache-2.0
"""Drives a rollout engine and hands each finished group to whoever asked for it.

The engine is a state machine (add, advance, use weights); this is the only place that calls it, one
call at a time, so that weights change between two advances. Training and validation requests go
through the same router and meet in the same batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from tandem.api import RolloutEngine, Runtime
from tandem.metrics.decode_pace import PaceRecorder
from tandem.metrics.trace import PAUSE, TraceRecorder
from tandem.types import Completion, EngineWork, GenerationRequest

STEPS_PER_ADVANCE = 32
"""Decode steps of a bounded advance: as long as new weights and new requests may have to wait."""

_MAX_FRUITLESS = 64
"""Bounded advances in a row without a result, beyond those that the tokens under way explain."""


@dataclass(slots=True)
class _Pending:
    """A request whose completions are being gathered."""

    request: GenerationRequest
    future: asyncio.Future[tuple[Completion, ...]]
    finished: dict[int, Completion] = field(default_factory=dict[int, Completion])


class EngineSpans:
    """The spans of the engines behind a rollout in the trace: each from the advance that it begins
    in to the one that collects what it has done.

    Args:
        work: what each engine has to do at this moment.
    """

    def __init__(self, trace: TraceRecorder, work: Callable[[], Sequence[EngineWork]]) -> None:
        self.trace = trace
        self._work = work
        self._open: dict[int, ExitStack] = {}
        for number in range(len(work())):
            trace.expect(_track(number))

    @contextmanager
    def advancing(self, version: int) -> Generator[None, None, None]:
        """Around an advance under ``version``. If it raises, nobody works any more."""
        for number, work in enumerate(self._work()):
            if work is not EngineWork.NONE and number not in self._open:
                span = self.trace.span(_track(number), "generate", details={"version": version})
                self._open[number] = ExitStack()
                self._open[number].enter_context(span)
        try:
            yield
        except BaseException:
            self._close(self._open.keys())
            raise
        self.close_idle()

    def close_idle(self) -> None:
        """End the spans of those that compute nothing at this moment."""
        under_way = {n for n, work in enumerate(self._work()) if work is EngineWork.UNDER_WAY}
        self._close(self._open.keys() - under_way)

    def _close(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self._open.pop(number).close()


def _track(number: int) -> str:
    return f"generate/{number}"


class RolloutRouter:
    """Consumes: requests, versions. Waits for: work. Unblocked by: ``submit``, ``use_weights``.
    Produces: completions of whole groups.

    Args:
        pace: notes when sequences end.
        is_bounded: whether the engine is to stop within sequences, for requests and weights that
            come while it generates.
        num_rows: sequences that it generates at once; None if ``room`` is not to count them.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        runtime: Runtime,
        *,
        spans: EngineSpans,
        pace: PaceRecorder,
        is_bounded: bool,
        num_rows: int | None = None,
    ) -> None:
        self._num_rows = num_rows
        self._engine = engine
        self._runtime = runtime
        self._spans = spans
        self._trace = spans.trace
        self._pace = pace
        self._max_steps = STEPS_PER_ADVANCE if is_bounded else None
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[GenerationRequest] = []
        self._num_sent = 0
        self._num_fruitless = 0
        self._is_held = self._is_paused = self._is_calling = False
        self._wanted_version: int | None = None
        self._version = -1
        self._changed = asyncio.Condition()
        self._has_work = asyncio.Event()

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
        self._look_for_work()
        return futures

    async def room(self) -> int | None:
        """Wait until no more than a quarter of the rows' number of sequences wait for a row; how
        many may be added so that it is a half. None without rows.

        From its admission on a group grows old. What was admitted long before it had rows would
        make batches wait for its stragglers.
        """
        if self._num_rows is None:
            return None
        lot = max(self._num_rows // 4, 1)
        most = self._num_rows + lot
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._pending) <= most)
        return most + lot - len(self._pending)

    async def drain(self) -> None:
        """Send nothing more, and return once all that was sent has finished. ``use_weights`` ends
        this.
        """
        self._is_held = True
        self._look_for_work()
        async with self._changed:
            await self._changed.wait_for(lambda: self._num_sent == 0)

    async def pause(self) -> None:
        """Begin no advance, and return once none is under way. ``use_weights`` ends this."""
        self._is_paused = True
        self._look_for_work()
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_calling)
        await self._runtime.call(self._engine.settle)
        self._spans.close_idle()

    async def use_weights(self, version: int) -> None:
        """Return once the whole engine uses ``version``, between two advances."""
        self._wanted_version = version
        self._look_for_work()
        async with self._changed:
            await self._changed.wait_for(lambda: self._version == version)

    async def run(self) -> None:
        """Advance the engine as long as there is work; ends only by cancellation."""
        while True:
            if not self._has_work.is_set():
                with self._trace.waiting("generate", self._reason()):
                    await self._has_work.wait()
            self._is_calling = True
            if self._wanted_version is not None:
                await self._switch(self._wanted_version)
            if self._unsent and not (self._is_held or self._is_paused):
                requests, self._unsent = self._unsent, []
                self._pace.begin(requests, is_alone=self._num_sent == 0)
                self._num_sent += sum(len(request.sample_ids) for request in requests)
                await self._runtime.call(self._engine.add, requests)
            if self._num_sent and self._may_advance():
                with self._spans.advancing(self._version):
                    completions = await self._runtime.call(self._engine.advance, self._max_steps)
                self._deliver(completions)
            self._is_calling = False
            await self._tell()
            self._look_for_work()

    def _reason(self) -> str:
        """What is waited for without work."""
        return PAUSE if self._is_paused else "sync" if self._is_held else "admission"

    def _may_advance(self) -> bool:
        """Weights on their way may need what is under way to be collected."""
        return not self._is_paused or self._wanted_version is not None

    def _look_for_work(self) -> None:
        has_requests = bool(self._unsent) and not self._is_held
        has_generation = bool(self._num_sent or has_requests) and not self._is_paused
        if has_generation or self._wanted_version is not None:
            self._has_work.set()
        else:
            self._has_work.clear()

    async def _tell(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _switch(self, version: int) -> None:
        """Ask for ``version``; where it is still on its way, generation goes on meanwhile."""
        with self._trace.span("sync", "sync", details={"version": version}):
            is_in_use = await self._runtime.call(self._engine.set_weights_version, version)
        if is_in_use:
            self._version, self._wanted_version = version, None
            self._is_held = self._is_paused = False
            self._trace.mark("sync", "version in use", details={"version": version})
        elif not self._num_sent:
            raise RuntimeError(f"the rollout engine does not take version {version}, and is idle")

    def _deliver(self, completions: Sequence[Completion]) -> None:
        if not completions:
            self._check_progress()
            return
        self._num_fruitless = 0
        self._num_sent -= len(completions)
        for completion in completions:
            self._pace.end(len(completion.token_ids))
            pending = self._pending.pop(completion.sample_id)
            pending.finished[completion.sample_id] = completion
            ids = pending.request.sample_ids
            if len(pending.finished) == len(ids) and not pending.future.cancelled():
                pending.future.set_result(tuple(pending.finished[i] for i in ids))

    def _check_progress(self) -> None:
        """A sequence that was lost must not be waited for without end."""
        self._num_fruitless += 1
        if self._max_steps is not None:
            if self._num_fruitless <= _MAX_FRUITLESS:
                return
            tokens = sum(p.request.sampling.max_new_tokens for p in self._pending.values())
            if self._num_fruitless <= _MAX_FRUITLESS + tokens // self._max_steps:
                return
        raise RuntimeError(f"the rollout engine lost {self._num_sent} of its sequences")
