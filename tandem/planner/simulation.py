# SPDX-License-Identifier: Apache-2.0
"""The pipeline itself under a virtual clock: engines that compute nothing, announce how long that
would have taken, and share devices as their groups say.

Everything between the engines is the code of a real run. Use it to test schedules and to predict
the time of a step. What it leaves out: memory, failures, and that a pass over more sequences at a
time is slower for each of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.api import Engines, WeightStage
from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.schedule import schedule_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import open_source
from tandem.data.prompts import PromptEntry
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TraceEvent, TraceRecorder
from tandem.pipeline.context import RunContext, Store
from tandem.pipeline.loop import Pipeline, RunSummary
from tandem.planner.engines import (
    REFERENCE,
    ROLLOUT,
    SCORER,
    TRAINER,
    SimulatedEngine,
    SimulatedPolicy,
    SimulatedRollout,
    SimulatedRuntime,
    SimulatedStage,
    SimulatedTimes,
)
from tandem.planner.virtual_time import run_virtually
from tandem.types import (
    Completion,
    Group,
    Prompt,
    RewardOutcome,
    RewardRequest,
    RewardStatus,
    StepReport,
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What came of it: rows as logged with the moment of each, and the trace.

    ``samples`` are the completions that were trained on, by step.
    """

    summary: RunSummary
    rows: tuple[tuple[float, StepReport], ...]
    events: tuple[TraceEvent, ...]
    samples: Mapping[int, tuple[Completion, ...]]
    end_s: float

    def step_seconds(self, *, after: int, through: int | None = None) -> float:
        """Mean time between the ends of two steps' updates, from step ``after`` to ``through``
        (None: the last). With a lag of g the last g steps have nothing generated beside them.
        """
        ends = {
            int(e.details["step"]): e.end_s
            for e in self.events
            if e.track == TRAINER and e.name == "update"
        }
        last = max(ends) if through is None else through
        return (ends[last] - ends[after]) / (last - after)


class _World(SimulatedEngine):
    """The other parts: rewards, text, store, records."""

    def __init__(self, times: SimulatedTimes, score: Callable[[int, int], float]) -> None:
        super().__init__(times, ())
        self._score = score
        self.rows: list[tuple[float, StepReport]] = []
        self.events: list[TraceEvent] = []
        self.samples: dict[int, tuple[Completion, ...]] = {}

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Implements ``parts.Rewards``."""
        self.announce("reward")
        await asyncio.sleep(self.announced_s)
        return [
            RewardOutcome(RewardStatus.VALUE, self._score(request.ground_truth, k))
            for k, request in enumerate(requests)
        ]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Implements ``parts.Codec``."""
        return ["" for _ in ids]

    def save_own_template(self, folder: Path) -> None:
        """Implements ``parts.Codec``."""

    def writing(self, step: int, state: dict[str, Any]) -> AbstractContextManager[Path]:
        """Implements ``parts.Store``: nothing is saved."""
        raise RuntimeError(f"a simulated run saves nothing, also not at step {step}")

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Keep what was trained on."""
        samples = [sample for group in groups for sample in group.samples]
        self.samples[step] = tuple(c for sample in samples for c in sample.trajectory.completions)


@dataclass(frozen=True, slots=True)
class _Sink:
    """Implements ``api.MetricSink`` and ``trace.TraceSink``."""

    world: _World

    def write(self, report: StepReport) -> None:
        """Keep a row with its moment."""
        self.world.rows.append((asyncio.get_running_loop().time(), report))

    def append(self, event: TraceEvent) -> None:
        """Keep an event."""
        self.world.events.append(event)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """Nothing to release."""


@dataclass(frozen=True, slots=True)
class _Recorder:
    """Implements ``parts.Recorder``."""

    world: _World

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None:
        """Keep what was trained on."""
        self.world.record(step, groups)

    def close(self) -> None:
        """Nothing is open."""


def _alternately(row: int, k: int) -> float:
    return float(k % 2)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a simulated run has around it.

    Attributes:
        groups: tasks that share devices; those of a group never run at the same time.
        num_rows, num_validation_rows: of the data.
        num_engines: that generate, each with as many of the sequences at a time.
        num_engine_rows: what admission reckons with instead of ``SimulatedTimes.num_slots``.
        stages_weights: weights travel while training and generation go on.
        store: takes checkpoints, if the configuration asks for any.
        checkpoint: the run goes on from there. ``is_validated``: as in ``Pipeline.restore``.
        stop_s: when the run is asked to stop.
        score: the reward of sample k of a row.
    """

    groups: Sequence[Sequence[str]]
    num_rows: int
    num_validation_rows: int = 0
    num_engines: int = 1
    num_engine_rows: int | None = None
    stages_weights: bool = False
    store: Store | None = None
    checkpoint: Checkpoint | None = None
    is_validated: bool = True
    stop_s: float | None = None
    score: Callable[[int, int], float] = _alternately


def simulate(config: RunConfig, times: SimulatedTimes, *, around: Surroundings) -> SimulatedRun:
    """Run the pipeline as ``config`` says. Raises what it raises, or DeadlockError."""
    return run_virtually(_simulate(config, times, around=around))


async def _simulate(
    config: RunConfig, times: SimulatedTimes, *, around: Surroundings
) -> SimulatedRun:
    clock = asyncio.get_running_loop().time
    world = _World(times, around.score)
    parts = _parts(config, times, around=around, world=world)
    pipeline = Pipeline(parts)
    if around.checkpoint is not None:
        await pipeline.restore(around.checkpoint, is_logged=True, is_validated=around.is_validated)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pipeline.run())
        if around.stop_s is not None:
            await asyncio.wait([running], timeout=around.stop_s)
            await pipeline.stop()
    parts.trace.close()
    return SimulatedRun(
        running.result(), tuple(world.rows), tuple(world.events), dict(world.samples), clock()
    )


def _parts(
    config: RunConfig, times: SimulatedTimes, *, around: Surroundings, world: _World
) -> RunContext:
    clock = asyncio.get_running_loop().time
    entries = [_entry(row) for row in range(around.num_rows)]
    source = open_source(entries, config.data, total_epochs=config.trainer.total_epochs)
    return RunContext(
        config=config,
        schedule=schedule_run(config, around.num_rows),
        runtime=SimulatedRuntime(),
        engines=_engines(config, times, around=around),
        source=source,
        validation_prompts=[_prompt(row) for row in range(around.num_validation_rows)],
        codec=world,
        rewards=world,
        store=world if around.store is None else around.store,
        sinks=(_Sink(world),),
        recorder=_Recorder(world),
        facts=ComputeFacts(None, "", num_devices=1, num_training_devices=1),
        preferred_tokens=None,
        clock=clock,
        allocated_bytes=lambda: 0,
        reserved_bytes=lambda: 0,
        trace=TraceRecorder(clock, sink=_Sink(world)),
    )


def _engines(config: RunConfig, times: SimulatedTimes, *, around: Surroundings) -> Engines:
    pool_of = {task: "+".join(group) for group in around.groups for task in group}
    trainer = SimulatedPolicy(times, [pool_of[TRAINER]], task=SCORER)
    scorer = trainer
    if pool_of.get(SCORER, pool_of[TRAINER]) != pool_of[TRAINER]:
        scorer = SimulatedPolicy(times, [pool_of[SCORER]], task=SCORER)
    reference = None
    if config.needs_reference:
        reference = SimulatedPolicy(
            times, [pool_of.get(REFERENCE, pool_of[TRAINER])], task=REFERENCE
        )
    rollout = SimulatedRollout(
        times,
        [pool_of[ROLLOUT]],
        num_samples=config.actor_rollout_ref.rollout.n,
        num_engines=around.num_engines,
        sync=SimulatedEngine(times, ()),
    )
    stage: WeightStage | None = SimulatedStage(times, rollout) if around.stages_weights else None
    return Engines(
        trainer,
        rollout,
        reference,
        scorer,
        stage,
        work=rollout.work,
        generates_apart=pool_of[ROLLOUT] != pool_of[TRAINER],
        num_rows=around.num_engine_rows or times.num_slots,
    )


def _entry(row: int) -> PromptEntry:
    tokens = np.array([1], dtype=np.int32)
    return PromptEntry(row, "simulated", row, {}, str(row), str(row), tokens)


def _prompt(row: int) -> Prompt:
    return _entry(row).as_draw(row)


def simulated_config(
    *, num_prompts: int, num_samples: int, lag: int, num_steps: int, further: Sequence[str] = ()
) -> RunConfig:
    """A configuration for ``simulate``: one optimizer step a batch, no validation, no reference."""
    keys = (
        f"data.train_batch_size={num_prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={num_prompts}",
        f"actor_rollout_ref.rollout.n={num_samples}",
        "data.max_response_length=65536",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "data.val_files=[]",
        f"trainer.async_pipeline={lag > 0}",
        f"trainer.generate_ahead_steps={lag}",
        f"trainer.total_training_steps={num_steps}",
    )
    return load_config(RunConfig, [*keys, *further]).config
