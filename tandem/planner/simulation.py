# SPDX-License-Identifier: Apache-2.0
"""The simulation of a run: the real pipeline with simulated engines under a virtual clock.

Everything between the engines is the code of a real run. Tests of schedules and the planner use the
simulation. It has no memory limits and no failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tandem.api import Engines, WeightStage
from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.schedule import schedule_run
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import open_source
from tandem.data.rendering import TOOL_AGENT, PromptEntry
from tandem.metrics.activity import Activity
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TraceEvent, TraceRecorder
from tandem.pipeline.context import RunContext, Store
from tandem.pipeline.conversing import Conversing
from tandem.pipeline.loop import Pipeline
from tandem.pipeline.progress import RunSummary
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
    RewardOutcome,
    RewardRequest,
    RewardStatus,
    StepReport,
)


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """The result of a simulation.

    Attributes:
        rows: the records, each with the time at which it was written.
        events: the trace.
        samples: the completions that were trained on, by step.
        end_s: the time at which the run ended.
    """

    summary: RunSummary
    rows: tuple[tuple[float, StepReport], ...]
    events: tuple[TraceEvent, ...]
    samples: Mapping[int, tuple[Completion, ...]]
    end_s: float

    def step_seconds(self, *, after: int, through: int | None = None) -> float:
        """Return the mean time between the ends of two updates, from step ``after`` on.

        Args:
            through: the last step to count, None for the last of the run. With a lag of g, the
                last g steps are shorter, because nothing is generated meanwhile.
        """
        ends = {
            int(e.details["step"]): e.end_s
            for e in self.events
            if e.track == TRAINER and e.name == "update"
        }
        last = max(ends) if through is None else through
        return (ends[last] - ends[after]) / (last - after)


class _Harness(SimulatedEngine):
    """The rewards, texts, store, metric sink and trace sink of a simulated run."""

    def __init__(self, times: SimulatedTimes, score: Callable[[int, int], float]) -> None:
        super().__init__(times, ())
        self._score = score
        self.rows: list[tuple[float, StepReport]] = []
        self.events: list[TraceEvent] = []
        self.samples: dict[int, tuple[Completion, ...]] = {}

    async def score(self, requests: Sequence[RewardRequest]) -> list[RewardOutcome]:
        """Score as ``context.Rewards`` does, in the seconds of ``reward``."""
        self.announce("reward")
        await asyncio.sleep(self.announced_s)
        return [
            RewardOutcome(RewardStatus.VALUE, self._score(request.ground_truth, k))
            for k, request in enumerate(requests)
        ]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Return empty texts, for ``context.Codec``."""
        return ["" for _ in ids]

    def save_own_template(self, folder: Path) -> None:
        """Save nothing, for ``context.Codec``."""

    def writing(self, step: int, state: dict[str, Any]) -> AbstractContextManager[Path]:
        """Refuse to save, for ``context.Store``."""
        raise RuntimeError(f"a simulated run without a store cannot save step {step}")

    def record(self, step: int, groups: Sequence[Group]) -> None:
        """Keep the completions that were trained on."""
        samples = [sample for group in groups for sample in group.samples]
        self.samples[step] = tuple(c for sample in samples for c in sample.trajectory.completions)

    def write(self, report: StepReport) -> None:
        """Keep a record with its time, for ``api.MetricSink``."""
        self.rows.append((asyncio.get_running_loop().time(), report))

    def append(self, event: TraceEvent) -> None:
        """Keep an event, for ``trace.TraceSink``."""
        self.events.append(event)

    def flush(self) -> None:
        """Hold nothing back."""

    def close(self) -> None:
        """Release nothing."""


@dataclass(frozen=True, slots=True)
class _Recorder:
    """A ``context.Recorder`` that passes groups on to the harness."""

    harness: _Harness

    def write(self, step: int, groups: Sequence[Group], *, advantages: Sequence[float]) -> None:
        """Keep the completions that were trained on."""
        self.harness.record(step, groups)

    def close(self) -> None:
        """Release nothing."""


def _alternately(row: int, k: int) -> float:
    return float(k % 2)


@dataclass(frozen=True, slots=True)
class SimulatedSetup:
    """The devices, data and checkpoints of a simulated run.

    Attributes:
        groups: the groups of tasks that share devices; tasks of a group never run at the same time.
        num_rows, num_validation_rows: the sizes of the data.
        num_engines: the number of engines, with equal shares of the sequences.
        num_engine_rows: the number of rows for admission; None for ``SimulatedTimes.num_slots``.
        stages_weights: whether weights are transferred beside training and generation.
        store: the store of checkpoints; needed if the configuration saves any.
        checkpoint: the checkpoint to continue from.
        is_validated: as in ``Pipeline.restore``.
        stop_s: the time at which the run is asked to stop.
        score: returns the reward of sample k of a row.
        activity: shows the phase of the run.
        conversing: the environments that answer turns, if every row is an episode of several turns.
            Each turn then takes the seconds of a response.
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
    activity: Activity = field(default_factory=Activity)
    conversing: Conversing | None = None


def simulate(config: RunConfig, times: SimulatedTimes, *, setup: SimulatedSetup) -> SimulatedRun:
    """Run the pipeline with ``config`` and return its result.

    Raises:
        DeadlockError: all tasks of the pipeline wait for each other.
    """
    return run_virtually(_simulate(config, times, setup=setup))


async def _simulate(
    config: RunConfig, times: SimulatedTimes, *, setup: SimulatedSetup
) -> SimulatedRun:
    clock = asyncio.get_running_loop().time
    harness = _Harness(times, setup.score)
    context = _context(config, times, setup=setup, harness=harness)
    pipeline = Pipeline(context)
    if setup.checkpoint is not None:
        await pipeline.restore(setup.checkpoint, is_logged=True, is_validated=setup.is_validated)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(pipeline.run())
        if setup.stop_s is not None:
            await asyncio.wait([running], timeout=setup.stop_s)
            await pipeline.stop()
    context.trace.close()
    return SimulatedRun(
        running.result(),
        tuple(harness.rows),
        tuple(harness.events),
        dict(harness.samples),
        clock(),
    )


def _context(
    config: RunConfig, times: SimulatedTimes, *, setup: SimulatedSetup, harness: _Harness
) -> RunContext:
    clock = asyncio.get_running_loop().time
    agent = "" if setup.conversing is None else TOOL_AGENT
    entries = [_entry(row, agent=agent) for row in range(setup.num_rows)]
    source = open_source(entries, config.data, total_epochs=config.trainer.total_epochs)
    return RunContext(
        config=config,
        schedule=schedule_run(config, setup.num_rows),
        runtime=SimulatedRuntime(),
        engines=_engines(config, times, setup=setup),
        source=source,
        validation_prompts=lambda: [
            _entry(row).as_draw(row) for row in range(setup.num_validation_rows)
        ],
        codec=harness,
        rewards=harness,
        store=harness if setup.store is None else setup.store,
        sinks=(harness,),
        recorder=_Recorder(harness),
        facts=ComputeFacts(None, "", num_devices=1, num_training_devices=1),
        conversing=setup.conversing,
        preferred_tokens=None,
        clock=clock,
        allocated_bytes=lambda: 0,
        reserved_bytes=lambda: 0,
        trace=TraceRecorder(clock, sink=harness),
        activity=setup.activity,
    )


def _engines(config: RunConfig, times: SimulatedTimes, *, setup: SimulatedSetup) -> Engines:
    pool_of = {task: "+".join(group) for group in setup.groups for task in group}
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
        num_engines=setup.num_engines,
        sync=SimulatedEngine(times, ()),
    )
    stage: WeightStage | None = SimulatedStage(times, rollout) if setup.stages_weights else None
    return Engines(
        trainer,
        rollout,
        reference,
        scorer,
        stage,
        work=rollout.work,
        generates_apart=pool_of[ROLLOUT] != pool_of[TRAINER],
        num_rows=setup.num_engine_rows or times.num_slots,
    )


def _entry(row: int, *, agent: str = "") -> PromptEntry:
    tokens = np.array([1], dtype=np.int32)
    return PromptEntry(row, "simulated", row, {}, str(row), str(row), tokens, agent=agent)


def simulated_config(
    *, num_prompts: int, num_samples: int, lag: float, num_steps: int, further: Sequence[str] = ()
) -> RunConfig:
    """Return a configuration with one optimizer step a batch, no validation and no reference."""
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
        "trainer.save_freq=0",
    )
    return load_config(RunConfig, [*keys, *further]).config
