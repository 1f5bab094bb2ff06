# SPDX-License-Identifier: Apache-2.0
"""Simulated engines, which compute nothing, and the runtime that lets the time of their work pass.

An engine announces how long a call would have taken. The runtime sleeps that long and holds the
devices of the engine meanwhile. A call takes effect at its start and returns after that time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import torch

from tandem.api import Loss, Scores
from tandem.pipeline.producer import BASELINE_SAMPLE_ID_BASE
from tandem.types import (
    Completion,
    EngineWork,
    FinishReason,
    GenerationRequest,
    LossScale,
    PackedBatch,
    UpdateReport,
)

P = ParamSpec("P")
R = TypeVar("R")

TRAINER, SCORER, REFERENCE, ROLLOUT = "actor-train", "logp", "ref_logp", "generate"
SYNC = "sync"


@dataclass(frozen=True, slots=True)
class SimulatedTimes:
    """The durations of all calls in seconds, and the number of sequences generated at a time.

    Attributes:
        response_s: returns the seconds of response k of draw uid, alone on its engine.
        validation_s: the seconds of a response in a validation.
        task_s: returns the seconds of call number i of ``actor-train`` (one optimizer step),
            ``logp``, ``ref_logp``, ``sync`` (a transfer of weights) or ``reward`` (a group).
        num_slots: the number of sequences generated at the same time; others wait.
        num_tokens: returns the tokens of a response of a number of seconds, evenly spread over the
            time.
        decode_step_s: the seconds of a decode step, for the bound on an advance.
        slowdown: returns the factor by which sequences and decode steps take longer at a number
            of concurrent sequences.
    """

    response_s: Callable[[int, int], float]
    task_s: Callable[[str, int], float]
    num_slots: int
    num_tokens: Callable[[float], int] = lambda _: 8
    decode_step_s: float = 0.01
    validation_s: float = 0.0
    slowdown: Callable[[int], float] = lambda _: 1.0


class SimulatedEngine:
    """A simulated engine on pools of devices.

    Attributes:
        announced_s: the seconds that the last method call would have taken.
    """

    data_parallel_size = sequence_parallel_size = 1

    def __init__(self, times: SimulatedTimes, pools: Sequence[str]) -> None:
        self.pools = tuple(sorted(set(pools)))
        self.announced_s = 0.0
        self.times = times
        self._num_calls: dict[str, int] = {}

    def announce(self, task: str) -> None:
        """Announce the seconds of the next call of ``task``."""
        number = self._num_calls.get(task, 0)
        self._num_calls[task] = number + 1
        self.announced_s = self.times.task_s(task, number)


class SimulatedPolicy(SimulatedEngine):
    """A simulated trainer, or a policy that only scores (``task`` names the scores)."""

    def __init__(self, times: SimulatedTimes, pools: Sequence[str], *, task: str) -> None:
        super().__init__(times, pools)
        self._task = task

    def score(self, batches: Sequence[PackedBatch], temperature: float) -> list[Scores]:
        """Return equal log-probs for all tokens."""
        self.announce(self._task)
        return [Scores(torch.full((len(batch.target_R),), -0.5)) for batch in batches]

    def update(
        self, batches: Sequence[PackedBatch], loss: Loss, *, scale: LossScale, temperature: float
    ) -> UpdateReport:
        """Take one optimizer step."""
        self.announce(TRAINER)
        return UpdateReport({}, grad_norm=1.0, learning_rate=1.0, skipped=False)

    def advance_schedule(self) -> None:
        """Advance in no time."""
        self.announced_s = 0.0

    def save(self, folder: Path) -> None:
        """Save nothing, in no time."""
        self.announced_s = 0.0

    def load(self, folder: Path) -> None:
        """Load nothing."""


@dataclass(slots=True)
class _Sequence:
    """A running response, with ``left_s`` of its ``total_s`` remaining."""

    sample_id: int
    total_s: float
    left_s: float
    version: int
    switches: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@dataclass(slots=True)
class _Engine:
    """An engine of a pool, with its sequences.

    Attributes:
        num_further: the number of further turns, which are the first of those that wait.
    """

    waiting: list[int] = field(default_factory=list[int])
    num_further: int = 0
    running: list[_Sequence] = field(default_factory=list[_Sequence])

    def size(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, request: GenerationRequest) -> None:
        """Queue a request: a further turn before all new samples."""
        is_further = request.first_index > 0
        place = self.num_further if is_further else len(self.waiting)
        self.waiting[place:place] = request.sample_ids
        self.num_further += len(request.sample_ids) if is_further else 0

    def take(self) -> int:
        """Remove and return the first that waits."""
        self.num_further = max(self.num_further - 1, 0)
        return self.waiting.pop(0)


class SimulatedRollout(SimulatedEngine):
    """A pool of engines that generates ``num_slots`` sequences at a time, each at its own speed.

    The engines have equal numbers of slots. A request goes to the engine with the fewest sequences.
    """

    def __init__(
        self,
        times: SimulatedTimes,
        pools: Sequence[str],
        *,
        num_samples: int,
        num_engines: int,
        sync: SimulatedEngine,
    ) -> None:
        super().__init__(times, pools)
        self._num_samples = num_samples
        self._slots_each = max(times.num_slots // num_engines, 1)
        self._sync = sync
        self._engines = [_Engine() for _ in range(num_engines)]
        self._version = -1
        self.is_staged = False

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests."""
        self.announced_s = 0.0
        for request in requests:
            min(self._engines, key=_Engine.size).add(request)

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Keep nothing between turns."""
        self.announced_s = 0.0

    def work(self) -> list[EngineWork]:
        """Return whether each engine has sequences."""
        return [EngineWork.NEXT if e.size() else EngineWork.NONE for e in self._engines]

    def advance(self, max_steps: int | None = None) -> list[Completion]:
        """Generate until a sequence ends, but at most ``max_steps`` decode steps."""
        for engine in self._engines:
            while engine.waiting and len(engine.running) < self._slots_each:
                sample_id = engine.take()
                seconds = self._seconds(sample_id)
                engine.running.append(_Sequence(sample_id, seconds, seconds, self._version))
        running = self._running()
        progress_s = min((s.left_s for s in running), default=0.0)
        if max_steps is not None:
            progress_s = min(progress_s, max_steps * self.times.decode_step_s)
        self.announced_s = progress_s * self.times.slowdown(len(running))
        for sequence in running:
            sequence.left_s -= progress_s
        ended = [s for s in running if s.left_s <= 1e-9]
        for engine in self._engines:
            engine.running = [s for s in engine.running if s.left_s > 1e-9]
        return [self._completion(sequence) for sequence in ended]

    def settle(self) -> None:
        """Return at once: nothing is under way between two calls."""
        self.announced_s = 0.0

    def metrics(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}

    def set_weights_version(self, version: int) -> bool:
        """Use ``version`` at once. Staged weights take no time, because they have arrived."""
        self.announced_s = 0.0
        if version != self._version and self._version >= 0 and not self.is_staged:
            self._sync.announce(SYNC)
            self.announced_s = self._sync.announced_s
        self._version = version
        for sequence in self._running():
            done = 1 - sequence.left_s / sequence.total_s
            num_tokens = self.times.num_tokens(sequence.total_s)
            index = math.ceil(done * num_tokens - 1e-6)
            if index == 0:
                sequence.version = version
            elif index < num_tokens:
                sequence.switches = [s for s in sequence.switches if s[0] != index]
                sequence.switches.append((index, version))
        return True

    def _running(self) -> list[_Sequence]:
        return [sequence for engine in self._engines for sequence in engine.running]

    def _seconds(self, sample_id: int) -> float:
        if sample_id >= BASELINE_SAMPLE_ID_BASE:
            return self.times.validation_s
        return self.times.response_s(*divmod(sample_id, self._num_samples))

    def _completion(self, sequence: _Sequence) -> Completion:
        count = self.times.num_tokens(sequence.total_s)
        return Completion(
            sequence.sample_id,
            (1,) * count,
            (-0.5,) * count,
            FinishReason.STOP,
            sequence.version,
            tuple(sequence.switches),
        )


class SimulatedStage(SimulatedEngine):
    """A stage that transfers weights in the seconds of ``sync``, beside training and rollout."""

    def __init__(self, times: SimulatedTimes, rollout: SimulatedRollout) -> None:
        super().__init__(times, ())
        rollout.is_staged = True

    def stage(self, version: int) -> None:
        """Take the seconds of a transfer."""
        self.announce(SYNC)


class SimulatedRuntime:
    """An ``api.Runtime`` whose calls take the announced seconds on the devices of the engine."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}

    async def call(self, function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``function`` once no other call uses its devices."""
        engine = cast(SimulatedEngine, cast(Any, function).__self__)
        async with AsyncExitStack() as devices:
            for pool in engine.pools:
                lock = self._locks.setdefault(pool, asyncio.Lock())
                await devices.enter_async_context(lock)
            result = function(*args, **kwargs)
            if engine.announced_s > 0:
                await asyncio.sleep(engine.announced_s)
        return result

    async def watch(self) -> None:
        """Wait forever, because no process can fail."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Release nothing."""
