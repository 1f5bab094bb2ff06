# SPDX-License-Identifier: Apache-2.0
"""The loop that drives a rollout engine and returns the completions of each request together.

The engine is a state machine (add, advance, use weights). Only this loop calls it, one call at a
time, so that weights change between two advances. Requests of training and validation share its
batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import Enum

from tandem.api import Rollout, Runtime
from tandem.metrics.decode_pace import PaceRecorder
from tandem.metrics.trace import PAUSE, TraceRecorder
from tandem.types import Completion, EngineWork, GenerationRequest

STEPS_PER_ADVANCE = 32
"""The decode steps of a bounded advance; new weights and requests wait no longer than it takes."""

_MAX_IDLE_ADVANCES = 64
"""The number of bounded advances without a completion, beyond those that all remaining tokens need,
that proves that a sequence was lost."""


@dataclass(slots=True)
class _Pending:
    """A request whose completions are being collected."""

    sample_ids: tuple[int, ...]
    request: GenerationRequest
    future: asyncio.Future[tuple[Completion, ...]]
    finished: dict[int, Completion] = field(default_factory=dict[int, Completion])


class EngineSpans:
    """The spans of the rollout's engines in the trace.

    A span lasts from the advance in which an engine begins to work until the one that collects its
    results.

    Args:
        work: returns whether each engine has work now.
    """

    def __init__(self, trace: TraceRecorder, work: Callable[[], Sequence[EngineWork]]) -> None:
        self.trace = trace
        self._work = work
        self._open: dict[int, ExitStack] = {}
        for number in range(len(work())):
            trace.expect(_track(number))

    @contextmanager
    def advancing(self, version: int) -> Generator[None, None, None]:
        """Record an advance under ``version``. If it raises, all spans end."""
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
        """End the spans of engines that compute nothing at this moment."""
        under_way = {n for n, work in enumerate(self._work()) if work is EngineWork.UNDER_WAY}
        self._close(self._open.keys() - under_way)

    def _close(self, numbers: Iterable[int]) -> None:
        for number in list(numbers):
            self._open.pop(number).close()


def _track(number: int) -> str:
    return f"generate/{number}"


class LoopState(Enum):
    """The states of ``RolloutLoop``."""

    GENERATING = "generating"
    DRAINING = "draining"
    PAUSED = "paused"


_IDLE_REASON = {
    LoopState.GENERATING: "admission",
    LoopState.DRAINING: "sync",
    LoopState.PAUSED: PAUSE,
}
"""The wait that the trace shows for an engine without work."""


class RolloutLoop:
    """The loop that advances the rollout engine.

    It consumes requests and weights versions, waits for either, is unblocked by ``submit`` and
    ``use_weights``, and produces the completions of whole groups.

    ==========  =========================  ==========  ===========================================
    State       Event                      Next state  Who waits for it
    ==========  =========================  ==========  ===========================================
    GENERATING  ``drain``                  DRAINING    ``drain``, until all sequences have ended
    GENERATING  ``pause``                  PAUSED      ``pause``, until no engine call is under way
    any         the engine has taken the   GENERATING  ``use_weights``
                version of ``use_weights``
    ==========  =========================  ==========  ===========================================

    GENERATING sends requests to the engine and advances it. DRAINING only advances it, and sends
    the further turns of samples that were begun, which end under the weights they began with. A
    sample whose request ``continues`` is open from the end of a turn until its next one or until
    ``forget``. PAUSED does neither, except that it advances the engine while a version is on its
    way, because the engine may have to collect its sequences before it can take the version.

    Args:
        pace: the recorder of when sequences end.
        is_bounded: whether an advance ends after ``STEPS_PER_ADVANCE`` steps, so that requests and
            weights that arrive meanwhile do not wait for whole sequences.
        num_rows: the number of sequences that the engine generates at once; None if ``room`` does
            not limit them.
        in_waves: whether requests wait until the engine is empty and each open sample has its next
            turn or is closed. They are then sent in the order of their samples, so that times
            decide nothing.
        lacks_weights: see ``api.Engines``.
    """

    def __init__(
        self,
        engine: Rollout,
        runtime: Runtime,
        *,
        spans: EngineSpans,
        pace: PaceRecorder,
        is_bounded: bool,
        num_rows: int | None = None,
        in_waves: bool = False,
        lacks_weights: Callable[[], bool] = lambda: False,
    ) -> None:
        self._engine = engine
        self._lacks_weights = lacks_weights
        self._when_starved: Callable[[], Awaitable[None]] | None = None
        self._counters: dict[str, float] = {}
        self._runtime = runtime
        self._spans = spans
        self._trace = spans.trace
        self._pace = pace
        self._max_steps = STEPS_PER_ADVANCE if is_bounded else None
        self._num_rows = num_rows
        self._in_waves = in_waves
        self._pending: dict[int, _Pending] = {}
        self._unsent: list[GenerationRequest] = []
        self._open: set[int] = set()
        self._ended: list[int] = []
        self._num_sent = 0
        self._idle_advances = 0
        self._state = LoopState.GENERATING
        self._version = -1
        self._wanted_version: int | None = None
        self._is_calling = False
        self._changed = asyncio.Condition()
        self._has_work = asyncio.Event()

    def submit(
        self, requests: Sequence[GenerationRequest]
    ) -> list[asyncio.Future[tuple[Completion, ...]]]:
        """Queue requests that reach the engine together.

        Returns:
            One future a request, with its completions in the order of ``sample_ids``.
        """
        futures = [self._expect(request, request.sample_ids) for request in requests]
        self._unsent.extend(requests)
        self._look_for_work()
        return futures

    @property
    def num_unfinished(self) -> int:
        """The number of sequences whose completions have not been collected."""
        return len(self._pending)

    @property
    def is_starved(self) -> bool:
        """Whether the engine lost its weights, and generates nothing until ``use_weights``."""
        return self._lacks_weights()

    def when_starved(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Call ``tell`` after each engine call that left the engine without weights."""
        self._when_starved = tell

    @property
    def version(self) -> int:
        """The version of the weights in use."""
        return self._version

    def submit_apart(
        self, request: GenerationRequest
    ) -> list[asyncio.Future[tuple[Completion, ...]]]:
        """Queue a request whose samples are awaited one by one.

        Further turns go before requests for new samples: they are older, and engines may hold their
        caches.

        Returns:
            One future a sample, with one completion.
        """
        futures = [self._expect(request, (sample_id,)) for sample_id in request.sample_ids]
        self._open.difference_update(request.sample_ids)
        num_further = sum(one.first_index > 0 for one in self._unsent)
        place = num_further if request.first_index else len(self._unsent)
        self._unsent.insert(place, request)
        self._look_for_work()
        return futures

    async def forget(self, sample_ids: Iterable[int]) -> None:
        """Close samples that get no further turn. The engine frees what it keeps of them before it
        gets its next requests.
        """
        self._ended += sample_ids
        self._open.difference_update(sample_ids)
        self._look_for_work()
        async with self._changed:
            self._changed.notify_all()

    def _expect(
        self, request: GenerationRequest, sample_ids: tuple[int, ...]
    ) -> asyncio.Future[tuple[Completion, ...]]:
        pending = _Pending(sample_ids, request, asyncio.get_running_loop().create_future())
        self._pending.update(dict.fromkeys(sample_ids, pending))
        return pending.future

    def take_metrics(self) -> dict[str, float]:
        """Return ``rollout/engine/*``: the growth of the engine's counters since the last call."""
        before, self._counters = self._counters, dict(self._engine.metrics())
        return {
            f"rollout/engine/{name}": float(count - before.get(name, 0))
            for name, count in self._counters.items()
        }

    async def room(self) -> int | None:
        """Wait until at most ``num_rows / 4`` sequences are queued behind the engine's rows.

        Groups age from their admission on. Groups that were admitted long before they get rows
        would make later batches wait for their stragglers.

        Returns:
            The number of sequences to add until ``num_rows / 2`` are queued; None without a limit.
        """
        if self._num_rows is None:
            return None
        chunk = max(self._num_rows // 4, 1)
        most = self._num_rows + chunk
        async with self._changed:
            await self._changed.wait_for(lambda: len(self._pending) <= most)
        return most + chunk - len(self._pending)

    async def drain(self) -> None:
        """Send no more requests until ``use_weights``; return once the engine has no sequence, or
        is starved.
        """
        self._leave_generating(LoopState.DRAINING)
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.is_starved or (self._num_sent == 0 and not self._has_begun())
            )

    async def pause(self) -> None:
        """Start no advance until ``use_weights``; return once none is running."""
        self._leave_generating(LoopState.PAUSED)
        async with self._changed:
            await self._changed.wait_for(lambda: not self._is_calling)
        await self._runtime.call(self._engine.settle)
        self._spans.close_idle()

    async def use_weights(self, version: int) -> None:
        """Let the engine take ``version`` between two advances; return once it uses it.

        A starved engine may take the version in use again.
        """
        is_newer = version > self._version or (self.is_starved and version == self._version)
        if self._wanted_version is not None or not is_newer:
            raise RuntimeError(f"version {version} is wanted after {self._version}")
        self._wanted_version = version
        self._look_for_work()
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._version == version and self._wanted_version is None
            )

    async def run(self) -> None:
        """Advance the engine as long as there is work, until cancelled."""
        while True:
            if not self._has_work.is_set():
                with self._trace.waiting("generate", _IDLE_REASON[self._state]):
                    await self._has_work.wait()
            self._is_calling = True
            if self._wanted_version is not None:
                await self._switch(self._wanted_version)
            if self._ended and self._state is not LoopState.PAUSED and self._may_send():
                ended, self._ended = sorted(self._ended), []
                await self._runtime.call(self._engine.forget, ended)
            if requests := self._take_requests():
                self._pace.begin(requests, is_alone=self._num_sent == 0)
                self._num_sent += sum(len(request.sample_ids) for request in requests)
                await self._runtime.call(self._engine.add, requests)
            if self._num_sent and self._may_advance():
                with self._spans.advancing(self._version):
                    completions = await self._runtime.call(self._engine.advance, self._max_steps)
                self._deliver(completions)
            self._is_calling = False
            if self.is_starved and self._when_starved is not None:
                await self._when_starved()
            async with self._changed:
                self._changed.notify_all()
            self._look_for_work()

    def _take_requests(self) -> list[GenerationRequest]:
        """Remove and return the requests that may be sent now."""
        taken = self._sendable()
        numbers = set(map(id, taken))
        self._unsent = [one for one in self._unsent if id(one) not in numbers]
        if self._in_waves:
            taken.sort(key=lambda one: (not one.first_index, one.sample_ids))
        return taken

    def _sendable(self) -> list[GenerationRequest]:
        """Return the requests that may be sent now, in the order in which they were queued."""
        if self._state is LoopState.PAUSED or not self._may_send():
            return []
        is_draining = self._state is LoopState.DRAINING
        return [one for one in self._unsent if one.first_index or not is_draining]

    def _may_send(self) -> bool:
        return not self._in_waves or (self._num_sent == 0 and not self._open)

    def _has_begun(self) -> bool:
        """Return whether some sample has had a turn, and gets a further one."""
        return bool(self._open) or any(request.first_index for request in self._unsent)

    def _leave_generating(self, state: LoopState) -> None:
        if self._state is not LoopState.GENERATING:
            raise RuntimeError(f"the rollout cannot go from {self._state.name} to {state.name}")
        self._state = state
        self._look_for_work()

    def _may_advance(self) -> bool:
        may_generate = self._state is not LoopState.PAUSED or self._wanted_version is not None
        return may_generate and not self.is_starved

    def _look_for_work(self) -> None:
        may_advance = self._state is not LoopState.PAUSED and not self.is_starved
        has_work = bool(self._num_sent) and may_advance
        if has_work or self._sendable() or self._wanted_version is not None:
            self._has_work.set()
        else:
            self._has_work.clear()

    async def _switch(self, version: int) -> None:
        """Ask the engine to take ``version``. Generation goes on if it has not arrived yet."""
        with self._trace.span("sync", "sync", details={"version": version}):
            is_in_use = await self._runtime.call(self._engine.set_weights_version, version)
        if is_in_use:
            self._version, self._wanted_version = version, None
            self._state = LoopState.GENERATING
            self._trace.mark("sync", "version in use", details={"version": version})
        elif not self._num_sent:
            raise RuntimeError(f"the rollout engine does not take version {version}, and is idle")

    def _deliver(self, completions: Sequence[Completion]) -> None:
        if not completions:
            self._check_progress()
            return
        self._idle_advances = 0
        self._num_sent -= len(completions)
        for completion in completions:
            self._pace.end(len(completion.token_ids))
            pending = self._pending.pop(completion.sample_id)
            pending.finished[completion.sample_id] = completion
            if pending.request.continues and not pending.future.cancelled():
                self._open.add(completion.sample_id)
            ids = pending.sample_ids
            if len(pending.finished) == len(ids) and not pending.future.cancelled():
                pending.future.set_result(tuple(pending.finished[i] for i in ids))

    def _check_progress(self) -> None:
        """Raise RuntimeError if the engine must have lost a sequence."""
        if self.is_starved:
            return
        self._idle_advances += 1
        if self._max_steps is not None:
            if self._idle_advances <= _MAX_IDLE_ADVANCES:
                return
            tokens = sum(p.request.sampling.max_new_tokens for p in self._pending.values())
            # Twice, because a sequence of a worker or a server that is lost is generated again.
            if self._idle_advances <= _MAX_IDLE_ADVANCES + 2 * tokens // self._max_steps:
                return
        raise RuntimeError(f"the rollout engine lost {self._num_sent} of its sequences")
