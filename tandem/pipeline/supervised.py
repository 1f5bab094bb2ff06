# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning: one optimizer step per batch, with the engines, packing and checkpoints
of RL.

There is no rollout, hence neither admission nor lag. Stopping takes effect at a step boundary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tandem.algorithms.sft import SftLoss
from tandem.api import MetricSink, Runtime, Scores, TrainEngine
from tandem.checkpoint.store import Checkpoint, CheckpointStore
from tandem.config.derived.schedule import Schedule
from tandem.config.schema.sft import SftConfig
from tandem.data.packing import Plan, TrainSequence, pack_microbatches
from tandem.data.sft import SftSource
from tandem.data.tokenizer import TextCodec
from tandem.metrics.activity import Activity, Phase
from tandem.metrics.throughput import StepTime, throughput_metrics
from tandem.metrics.timers import Timers
from tandem.pipeline.failures import DivergenceGuard
from tandem.pipeline.microbatches import MemoryFit, microbatch_limits
from tandem.pipeline.progress import RunSummary, record, resume, save_model
from tandem.types import LossScale, UpdateReport

_TEMPERATURE = 1.0


@dataclass(frozen=True, slots=True)
class SupervisedContext:
    """The collaborators of a supervised run; see ``RunContext``."""

    config: SftConfig
    schedule: Schedule
    runtime: Runtime
    engine: TrainEngine
    num_devices: int
    source: SftSource
    validation: Callable[[], Sequence[TrainSequence]]
    store: CheckpointStore
    codec: TextCodec
    sinks: Sequence[MetricSink]
    preferred_tokens: int | None
    clock: Callable[[], float]
    activity: Activity = field(default_factory=Activity)


class SupervisedLoop:
    """A supervised fine-tuning run."""

    def __init__(self, context: SupervisedContext) -> None:
        self._context = context
        self._divergence = DivergenceGuard("optim.lr", context.config.optim.lr)
        limits = microbatch_limits(
            context.config, "actor-train", preferred_tokens=context.preferred_tokens
        )
        self._limits = limits.on(context.engine)
        self._memory = MemoryFit(
            "Set model.enable_gradient_checkpointing=True, or lower data.max_length."
        )
        self._timers = Timers(context.clock)
        self._step = self._step_under_way = 0
        self._saved_step = -1
        self._stopping = False
        self._validation: Mapping[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._must_log_again = False

    @property
    def step(self) -> int:
        """The current training step, up to the end of its validation; 0 before the first."""
        return self._step_under_way

    async def restore(self, checkpoint: Checkpoint, *, is_logged: bool) -> None:
        """Continue after ``checkpoint``. The engine has loaded its weights and optimizer already.

        Args:
            is_logged: whether the step of the checkpoint is on record. If it is not, ``run``
                records it first, from the metrics in the checkpoint.
        """
        state = resume(self._context.source, checkpoint)
        self._step = self._saved_step = self._step_under_way = checkpoint.step
        self._metrics, self._must_log_again = state["metrics"], not is_logged

    async def stop(self) -> None:
        """Ask the run to end at the next step boundary and to save there."""
        self._stopping = True

    async def run(self) -> RunSummary:
        """Train to the end of the schedule or until ``stop``."""
        schedule = self._context.schedule
        if self._step == 0 and schedule.validates_before_training:
            record(self._context.sinks, self._step, metrics=await self._validate())
        if self._must_log_again:
            await self._log_step()
        while self._step < schedule.total_training_steps and not self._stopping:
            self._step_under_way = self._step + 1
            with self._timers.section("step"):
                sequences = self._context.source.draw(self._context.config.data.train_batch_size)
                await self._learn(sequences)
                if schedule.is_save_step(self._step):
                    await self._save()
            await self._log_step(self._speed(sequences))
            await asyncio.sleep(0)  # a stop that a sink has asked for takes effect here
        if self._stopping and self._step > 0 and self._saved_step != self._step:
            await self._save()
        return RunSummary(self._step, self._stopping, self._validation)

    async def _learn(self, sequences: Sequence[TrainSequence]) -> None:
        report = await self._update(sequences)
        self._step += 1
        self._context.source.mark_trained([s.prompt_key for s in sequences])
        self._metrics = {
            **report.metrics,
            "train/lr": report.learning_rate,
            "train/grad_norm": report.grad_norm,
            "train/global_tokens": float(_num_tokens(sequences)),
            "training/global_step": float(self._step),
            "training/epoch": float(self._context.source.epoch),
        }

    async def _update(self, sequences: Sequence[TrainSequence]) -> UpdateReport:
        scale = LossScale(sum(s.num_loss_tokens for s in sequences), len(sequences))
        engine, runtime = self._context.engine, self._context.runtime

        async def update(plan: Plan) -> UpdateReport:
            batches = pack_microbatches(sequences, plan)
            return await runtime.call(
                engine.update, batches, SftLoss(), scale=scale, temperature=_TEMPERATURE
            )

        with self._context.activity.during(Phase.UPDATE):
            report = await self._memory.run(update, sequences, limits=self._limits)
        await runtime.call(engine.advance_schedule)
        self._divergence.check(self._step + 1, [report])
        return report

    def _speed(self, sequences: Sequence[TrainSequence]) -> dict[str, float]:
        seconds = self._timers.take()
        time = StepTime(step_s=seconds["step"], wall_s=seconds["step"])
        return {
            **throughput_metrics(
                _num_tokens(sequences), time=time, num_devices=self._context.num_devices
            ),
            **{f"timing_s/{name}": value for name, value in seconds.items()},
        }

    async def _log_step(self, speed: Mapping[str, float] | None = None) -> None:
        """Validate if it is due, and record the step.

        Args:
            speed: the metrics of its speed; None for a step that an earlier process trained.
        """
        metrics = {**self._metrics, **(speed or {})}
        if self._context.schedule.is_test_step(self._step):
            metrics.update(await self._validate())
        record(self._context.sinks, self._step, metrics=metrics)

    async def _validate(self) -> dict[str, float]:
        """Return the token-mean loss over the validation rows, {} without rows."""
        sequences = self._context.validation()
        engine, runtime = self._context.engine, self._context.runtime
        if not sequences:
            return {}

        async def score(plan: Plan) -> list[Scores]:
            batches = pack_microbatches(sequences, plan)
            return await runtime.call(engine.score, batches, _TEMPERATURE)

        with self._context.activity.during(Phase.VALIDATING):
            scored = await self._memory.run(score, sequences, limits=self._limits)
        total = sum(float(scores.score_R.double().sum()) for scores in scored)
        num_tokens = sum(s.num_loss_tokens for s in sequences)
        self._validation = {"val/loss": -total / num_tokens}
        return dict(self._validation)

    async def _save(self) -> None:
        data = self._context.source.state()
        state = {"step": self._step, "data": data, "metrics": self._metrics}
        context = self._context
        with (
            context.activity.during(Phase.SAVING),
            context.store.writing(self._step, state) as folder,
        ):
            await save_model(
                context.runtime, context.engine, folder=folder / "actor", codec=context.codec
            )
        self._saved_step = self._step


def _num_tokens(sequences: Sequence[TrainSequence]) -> int:
    return sum(sequence.num_tokens for sequence in sequences)
