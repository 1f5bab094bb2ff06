# SPDX-License-Identifier: Apache-2.0
"""The tasks of one run and the objects they share. Each task is defined in its own file."""

from __future__ import annotations

import asyncio

from tandem.config.schema.run import RunConfig
from tandem.metrics.decode_pace import PaceRecorder
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.batch import Batch
from tandem.pipeline.buffer import BatchRule, GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.prefetch import prepare_batch
from tandem.pipeline.producer import GroupProducer
from tandem.pipeline.rollout_loop import EngineSpans, RolloutLoop
from tandem.pipeline.validation import Validator
from tandem.pipeline.weights import FlowRule, WeightFlow


class RunTasks:
    """The asyncio tasks of a run, all in ``group``.

    Args:
        step: the number of training steps that were completed before.
    """

    def __init__(
        self, context: RunContext, buffer: GroupBuffer, *, group: asyncio.TaskGroup, step: int
    ) -> None:
        config, engines = context.config, context.engines
        batch_size, max_lag = config.data.train_batch_size, config.trainer.max_lag
        num_steps = max(context.schedule.total_training_steps - step, 0)
        rule = _flow_rule(config, generates_apart=engines.generates_apart)
        self._context = context
        self._buffer = buffer
        self.group = group
        self.gate = AdmissionGate(config.most_prompts_begun, num_steps * batch_size)
        self.pace = PaceRecorder(
            context.clock,
            num_engines=len(engines.work()),
            num_rows=engines.num_rows if max_lag == 0 else None,
        )
        self.rollout = RolloutLoop(
            engines.rollout,
            context.runtime,
            spans=EngineSpans(context.trace, engines.work),
            pace=self.pace,
            is_bounded=max_lag > 0 or context.conversing is not None,
            num_rows=None if rule.finishes_on_old_weights else engines.num_rows,
            in_waves=config.actor_rollout_ref.rollout.full_determinism,
            lacks_weights=engines.lacks_weights,
        )
        self.flow = WeightFlow(
            rule,
            runtime=context.runtime,
            stage=engines.stage,
            rollout=self.rollout,
            buffer=buffer,
            gate=self.gate,
            version=step,
        )
        self.producer = GroupProducer(
            context,
            gate=self.gate,
            rollout=self.rollout,
            buffer=buffer,
            version=self._version_in_use,
        )
        self.validator = Validator(context, self.rollout, flow=self.flow)
        endless = (context.runtime.watch(), self.rollout.run(), self.flow.run())
        self._endless = [group.create_task(task) for task in endless]
        self._preparing: asyncio.Task[Batch | None] | None = None

    def produce(self) -> None:
        """Start to generate for training."""
        self._endless.append(self.group.create_task(self.producer.run()))

    def prepare(self, version: int) -> asyncio.Task[Batch | None]:
        """Start to prepare the batch to train the weights ``version`` on."""
        preparing = prepare_batch(
            self._context, self._buffer, version=version, in_use=self._version_in_use
        )
        self._preparing = self.group.create_task(preparing)
        return self._preparing

    async def abandon(self) -> None:
        """Drop validations and stop waiting for weights, because the run is about to end."""
        self.validator.drop()
        await self.flow.abandon()

    def close(self) -> None:
        """Cancel the tasks that do not end by themselves."""
        for task in (*self._endless, self._preparing):
            if task is not None:
                task.cancel()

    def _version_in_use(self) -> int:
        return self.flow.in_use


def batch_rule(config: RunConfig) -> BatchRule:
    """Return the rule for forming the batches of a run."""
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
