# SPDX-License-Identifier: Apache-2.0
"""The tasks of one run and what they share, put together. What they do is in their own files."""

from __future__ import annotations

import asyncio

from tandem.config.schema.run import RunConfig
from tandem.metrics.decode_pace import PaceRecorder
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.batch import Batch
from tandem.pipeline.buffer import BatchRule, GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.journal import Journal
from tandem.pipeline.prefetch import prepare_batch
from tandem.pipeline.producer import GroupProducer
from tandem.pipeline.rollout_loop import EngineSpans, RolloutLoop
from tandem.pipeline.validation import Validator
from tandem.pipeline.weights import FlowRule, WeightFlow


class Stages:
    """The tasks of a run, started by and by."""

    def __init__(
        self, parts: RunContext, buffer: GroupBuffer, *, tasks: asyncio.TaskGroup, step: int
    ) -> None:
        config, batch_size = parts.config, parts.config.data.train_batch_size
        num_steps = max(parts.schedule.total_training_steps - step, 0)
        self._parts = parts
        self._buffer = buffer
        self.tasks = tasks
        self.gate = AdmissionGate((config.trainer.max_lag + 1) * batch_size, num_steps * batch_size)
        rule = _flow_rule(config, generates_apart=parts.engines.generates_apart)
        engines = parts.engines
        self.pace = PaceRecorder(
            parts.clock,
            num_engines=len(engines.work()),
            num_rows=engines.num_rows if config.trainer.max_lag == 0 else None,
        )
        self.rollout = RolloutLoop(
            engines.rollout,
            parts.runtime,
            spans=EngineSpans(parts.trace, engines.work),
            pace=self.pace,
            is_bounded=config.trainer.max_lag > 0,
            num_rows=None if rule.finishes_on_old_weights else engines.num_rows,
        )
        self.flow = WeightFlow(
            rule,
            runtime=parts.runtime,
            stage=engines.stage,
            rollout=self.rollout,
            buffer=buffer,
            gate=self.gate,
            version=step,
        )
        self.producer = GroupProducer(
            parts,
            gate=self.gate,
            rollout=self.rollout,
            buffer=buffer,
            version=lambda: self.flow.in_use,
        )
        self.validator = Validator(parts, self.rollout, flow=self.flow)
        self.journal = Journal(parts.sinks)
        endless = (parts.runtime.watch(), self.rollout.run(), self.flow.run(), self.journal.run())
        self._endless = [tasks.create_task(stage) for stage in endless]
        self._preparing: asyncio.Task[Batch | None] | None = None

    def produce(self) -> None:
        """Begin to generate for training."""
        self._endless.append(self.tasks.create_task(self.producer.run()))

    def prepare(self, version: int) -> asyncio.Task[Batch | None]:
        """The batch that the weights ``version`` are to be trained on, once it is ready."""
        preparing = prepare_batch(
            self._parts, self._buffer, version=version, in_use=lambda: self.flow.in_use
        )
        self._preparing = self.tasks.create_task(preparing)
        return self._preparing

    async def abandon(self) -> None:
        """The run is to end soon: validations are dropped, and weights not waited for."""
        self.validator.drop()
        await self.flow.abandon()

    def close(self) -> None:
        """End all tasks."""
        for task in (*self._endless, self._preparing):
            if task is not None:
                task.cancel()


def batch_rule(config: RunConfig) -> BatchRule:
    """How the batches of a run are formed."""
    trainer = config.trainer
    return BatchRule(
        config.data.train_batch_size, trainer.max_lag, passes_over=not trainer.lockstep
    )


def _flow_rule(config: RunConfig, *, generates_apart: bool) -> FlowRule:
    lockstep = config.trainer.lockstep
    return FlowRule(
        lockstep=lockstep,
        finishes_on_old_weights=lockstep or not config.actor_rollout_ref.rollout.partial_rollout,
        time_shared=not (lockstep or generates_apart),
        batch_size=config.data.train_batch_size,
    )
