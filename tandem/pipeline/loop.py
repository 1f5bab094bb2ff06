# SPDX-License-Identifier: Apache-2.0
"""The training loop: prompts -> admission -> rollout -> reward -> advantage -> pack -> train.

The same program runs synchronously and asynchronously. Its tasks: the rollout loop advances the
engine, the producer turns admitted prompts into scored groups, one task prepares the next batch,
the loop below trains on it, the weight flow brings the new weights to the rollout, and validations
run beside them. The loop owns the number of the training step (which is the version of the
weights), the checkpoints and the records. A stop (SIGTERM, Ctrl-C) takes effect at a step boundary:
prompts that were drawn but not trained on are drawn again later, and a running validation is
dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from tandem.algorithms.kl import AdaptiveKl, FixedKl, KlController, next_kl_controller
from tandem.checkpoint.store import Checkpoint
from tandem.config.schema.run import RunConfig
from tandem.metrics.activity import Phase
from tandem.metrics.learning import LearningWatch
from tandem.metrics.records import dump_samples
from tandem.metrics.reduction import update_metrics
from tandem.metrics.timers import Timers
from tandem.pipeline.batch import Batch, as_floats
from tandem.pipeline.buffer import GroupBuffer
from tandem.pipeline.context import RunContext
from tandem.pipeline.experience import Experience, assign_credit
from tandem.pipeline.failures import DivergenceGuard, require_fresh, warn_of_failed_rewards
from tandem.pipeline.phases import update_critic, update_policy
from tandem.pipeline.prefetch import finish_scoring
from tandem.pipeline.progress import RunSummary, record, resume, save_model
from tandem.pipeline.step_metrics import batch_metrics, own_metrics, speed_metrics
from tandem.pipeline.tasks import RunTasks, batch_rule
from tandem.types import UpdateReport

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]


class Pipeline:
    """A training run.

    Every step leaves one record in the sinks. A validation leaves a second record of its step as
    soon as it has ended, and training goes on meanwhile, except in lockstep. A checkpoint is
    written after the records of all earlier steps.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._config = context.config
        self._step = self._step_under_way = 0
        self._saved_step = -1
        self._num_left = 0
        self._validated_step = 0
        self._controller = initial_kl_controller(context.config)
        self._divergence = DivergenceGuard(
            "actor_rollout_ref.actor.optim.lr", context.config.actor_rollout_ref.actor.optim.lr
        )
        self._critic_divergence = DivergenceGuard(
            "critic.optim.lr", context.config.critic.optim.lr, model="critic"
        )
        self._learning = LearningWatch(context.config)
        self._metrics: dict[str, float] = {}
        self._recording: list[asyncio.Task[None]] = []
        self._stopping = False
        self._timers = Timers(context.clock)
        self._step_ended_s = context.clock()
        self._buffer = GroupBuffer(batch_rule(context.config))
        self._tasks: RunTasks | None = None

    @property
    def step(self) -> int:
        """The current training step, up to the end of its validation; 0 before the first."""
        return self._step_under_way

    async def restore(
        self, checkpoint: Checkpoint, *, is_logged: bool, is_validated: bool = True
    ) -> None:
        """Continue after ``checkpoint``: its data, version and KL coefficient.

        The engines have loaded its weights and optimizer states already.

        Args:
            is_logged: whether the step of the checkpoint is on record. A run that was killed
                between saving and logging has left its metrics in the checkpoint.
            is_validated: whether a validation of that step is on record. If one was due, and the
                run was killed before it ended, it is repeated.
        """
        state = resume(self._context.source, checkpoint, numbers=("kl_coefficient",))
        self._step = self._saved_step = self._step_under_way = checkpoint.step
        self._validated_step = checkpoint.step if is_validated else -1
        if isinstance(self._controller, AdaptiveKl):
            self._controller = replace(self._controller, coefficient=state["kl_coefficient"])
        if not is_logged:
            record(self._context.sinks, checkpoint.step, metrics=state["metrics"])

    async def stop(self) -> None:
        """Ask the run to end at the next step boundary and to save there."""
        self._stopping = True
        await self._buffer.close()
        if self._tasks is not None:
            await self._tasks.abandon()

    async def run(self) -> RunSummary:
        """Train to the end of the schedule or of the data, or until ``stop``.

        Raises:
            UserError: the rewards failed. The last step has been saved.
        """
        async with asyncio.TaskGroup() as group:
            tasks = RunTasks(self._context, self._buffer, group=group, step=self._step)
            self._tasks = tasks
            await tasks.flow.start()
            await self._validate_before_training(tasks)
            tasks.produce()
            await self._train(tasks)
            await self._flush_records()
            tasks.close()
        if tasks.producer.failure is not None:
            raise tasks.producer.failure
        return RunSummary(self._step, self._stopping, tasks.validator.metrics, self._num_left)

    async def _validate_before_training(self, tasks: RunTasks) -> None:
        schedule, step = self._context.schedule, self._step
        is_wanted = schedule.validates_before_training and (
            step == 0 or self._config.trainer.val_only
        )
        if not is_wanted and step >= schedule.total_training_steps:
            logger.info(
                "step %d of %d: nothing is left to train", step, schedule.total_training_steps
            )
        if is_wanted or (schedule.is_test_step(step) and step != self._validated_step):
            await self._log(tasks, validates=True)

    async def _train(self, tasks: RunTasks) -> None:
        total_steps = self._context.schedule.total_training_steps
        upcoming = tasks.prepare(self._step) if self._step < total_steps else None
        while upcoming is not None and not self._stopping:
            self._step_under_way = self._step + 1
            with self._timers.section("step"):
                batch = await self._next_batch(upcoming)
                if batch is None:
                    break
                more = self._step + 1 < total_steps
                upcoming = tasks.prepare(self._step + 1) if more else None
                experience = await self._learn(batch, tasks)
                if experience is None:
                    break
            await self._end_step(experience, tasks)
        await self._finish(tasks)

    async def _next_batch(self, upcoming: asyncio.Task[Batch | None]) -> Batch | None:
        """Return the next batch; None if the data has ended or the run stops.

        The wait counts as ``gen`` until the last sequence of the batch was generated, and as
        ``reward`` until the batch was complete.
        """
        begin_s = self._context.clock()
        with self._context.trace.waiting("actor-train", "batch"), self._collecting():
            batch = await upcoming
        if batch is None or self._stopping:
            return None
        generated_s = max(batch.generated_s, begin_s)
        self._timers.add("gen", generated_s - begin_s)
        self._timers.add("reward", max(batch.taken_s - generated_s, 0.0))
        return batch

    def _collecting(self) -> AbstractContextManager[None]:
        """Show how much of the next batch is there, if the samples of several steps are generated.

        A batch that is not formed lacks a group, though enough others may be complete.
        """
        if self._config.trainer.max_lag == 0:
            return nullcontext()
        size = self._config.data.train_batch_size
        num_samples = self._config.actor_rollout_ref.rollout.n
        return self._context.activity.during(
            Phase.COLLECTING,
            total=size * num_samples,
            done=lambda: min(self._buffer.num_complete, size - 1) * num_samples,
        )

    async def _learn(self, batch: Batch, tasks: RunTasks) -> Experience | None:
        """Train one step and publish its weights; return None if the run stops before it."""
        groups = batch.groups
        require_fresh(groups, version=self._step, max_lag=self._config.trainer.max_lag)
        dropped = tasks.producer.take_dropped()
        with self._context.trace.waiting("actor-train", "sync"):
            await tasks.flow.begin_training()
        if self._stopping:
            return None
        experience = await self._credit(batch)
        coefficient = self._controller.coefficient
        updating = tasks.group.create_task(self._update_models(experience))
        await asyncio.sleep(0)  # the update starts, and this thread is free meanwhile
        record_rollouts(self._context, experience, step=self._step + 1)
        described = batch_metrics(self._context, experience, kl_coefficient=coefficient)
        described |= own_metrics(self._context, experience, step=self._step + 1)
        updated = await updating
        self._step += 1
        warn_of_failed_rewards(groups, f"step {self._step}")
        self._learning.observe(self._step, described)
        self._context.source.mark_trained([group.prompt.uid for group in groups])
        self._context.source.mark_dropped(dropped)
        await self._publish_weights(tasks)
        self._metrics = {
            **described,
            **updated,
            "training/global_step": float(self._step),
            "training/epoch": float(self._context.source.epoch),
            "training/dropped_groups": float(len(dropped)),
        }
        return experience

    async def _credit(self, batch: Batch) -> Experience:
        batch = await finish_scoring(self._context, batch)
        for name, seconds in batch.seconds.items():
            self._timers.add(name, seconds)
        with self._timers.section("adv"):
            return assign_credit(batch, config=self._config, controller=self._controller)

    async def _update_models(self, experience: Experience) -> dict[str, float]:
        critic_reports = await self._update_critic(experience)
        reports = await self._update_policy(experience)
        return update_metrics(critic_reports, "critic") | update_metrics(reports)

    async def _update_critic(self, experience: Experience) -> list[UpdateReport]:
        if self._context.engines.critic is None:
            return []
        span = self._context.trace.span("actor-train", "update critic")
        with self._timers.section("update_critic"), span:
            reports = await update_critic(self._context, experience)
        self._critic_divergence.check(self._step + 1, reports)
        return reports

    async def _update_policy(self, experience: Experience) -> list[UpdateReport]:
        """Take the optimizer steps of one batch; none while the critic warms up, as in verl."""
        self._controller = next_kl_controller(
            self._controller,
            mean_kl=experience.mean_kl,
            num_sequences=len(experience.batch.sequences),
        )
        if self._step + 1 < self._config.trainer.critic_warmup:
            return []
        details = {"step": self._step + 1, "version": self._step + 1}
        with (
            self._timers.section("update_actor"),
            self._context.trace.span("actor-train", "update", details=details),
        ):
            reports = await update_policy(self._context, experience)
        self._divergence.check(self._step + 1, reports)
        return reports

    async def _publish_weights(self, tasks: RunTasks) -> None:
        """Publish the new weights; wait until they are in use if this step validates or is last."""
        is_last = self._step == self._context.schedule.total_training_steps
        is_required = is_last or self._context.schedule.is_test_step(self._step)
        with (
            self._timers.section("update_weights"),
            self._context.trace.waiting("actor-train", "sync"),
            self._context.activity.during(Phase.WEIGHTS),
        ):
            await tasks.flow.publish(self._step, is_required=is_required)

    async def _end_step(self, experience: Experience, tasks: RunTasks) -> None:
        schedule = self._context.schedule
        if schedule.is_save_step(self._step):
            with self._timers.section("step"):
                await self._flush_records()
                await self._save()
        validates = schedule.is_test_step(self._step)
        await self._log(tasks, validates=validates, experience=experience)
        if self._config.trainer.lockstep:
            await tasks.gate.release_trained(self._config.data.train_batch_size)

    async def _save(self) -> None:
        state = {
            "step": self._step,
            "weights_version": self._step,
            "data": self._context.source.state(),
            "kl_coefficient": self._controller.coefficient,
            "metrics": self._metrics,
        }
        with (
            self._timers.section("save_checkpoint"),
            self._context.trace.span("actor-train", "save", details={"step": self._step}),
            self._context.activity.during(Phase.SAVING),
            self._context.store.writing(self._step, state) as folder,
        ):
            await save_models(self._context, folder)
        self._saved_step = self._step

    async def _log(
        self, tasks: RunTasks, *, validates: bool, experience: Experience | None = None
    ) -> None:
        """Record this step, and start its validation if it is due.

        Args:
            experience: the data of the training step; None to record only a validation.
        """
        validation = None
        if validates and not self._stopping:
            self._validated_step = self._step
            validation = tasks.validator.start(tasks.group)
            if self._config.trainer.lockstep:
                await validation  # its time counts in this step
        now_s = self._context.clock()
        wall_s, self._step_ended_s = now_s - self._step_ended_s, now_s
        seconds, pace = self._timers.take(), tasks.pace.take()
        row: Metrics = pace
        if experience is not None:
            speed = speed_metrics(self._context, experience, seconds=seconds, wall_s=wall_s)
            row = {**self._metrics, **pace, **speed, **tasks.rollout.take_metrics()}
            if self._config.trainer.max_lag > 0:
                row |= self._context.trace.take_step(self._step)
        recording = tasks.group.create_task(self._record(self._step, row, validation=validation))
        self._recording = [task for task in self._recording if not task.done()] + [recording]
        if self._config.trainer.lockstep:
            await self._flush_records()

    async def _record(
        self, step: int, row: Metrics, *, validation: asyncio.Task[Metrics] | None
    ) -> None:
        """Write the record of a step while the next one runs, and then that of its validation."""
        record(self._context.sinks, step, metrics=row)
        if validation is not None:
            record(self._context.sinks, step, metrics=await validation)

    async def _flush_records(self) -> None:
        """Return once the records of all steps and validations are written."""
        for recording in self._recording:
            await recording

    async def _finish(self, tasks: RunTasks) -> None:
        """Validate and save after the last step if the data ended before the schedule.

        If the rewards failed, save the last step as at a stop.
        """
        if tasks.producer.failure is not None:
            await self.stop()
        schedule = self._context.schedule
        early = self._step < schedule.total_training_steps
        if early and not self._stopping:
            self._context.source.mark_dropped(tasks.producer.take_dropped())
            self._num_left = self._context.source.num_in_flight
            logger.warning(
                "the data ended at step %d of %d, because dropped groups used it up; %d prompt(s) "
                "are left over, too few for a batch, and are not trained on; raise "
                "trainer.total_epochs",
                self._step,
                schedule.total_training_steps,
                self._num_left,
            )
            await tasks.flow.wait_in_use()
            if self._step != self._validated_step and schedule.test_freq > 0:
                await self._log(tasks, validates=True)
            await self._flush_records()
        wants_save = self._stopping or (early and schedule.saves_at_end)
        if wants_save and self._step > 0 and self._saved_step != self._step:
            await self._save()


async def save_models(context: RunContext, folder: Path) -> None:
    """Save the weights and optimizer states of the policy and of the critic, if there is one."""
    engines = context.engines
    await save_model(context.runtime, engines.train, folder=folder / "actor", codec=context.codec)
    if engines.critic is not None:
        await save_model(context.runtime, engines.critic, folder=folder / "critic")


def record_rollouts(context: RunContext, experience: Experience, *, step: int) -> None:
    """Keep some rollouts for the report. Log a warning if they cannot be written."""
    groups, trainer = experience.batch.groups, context.config.trainer
    means = as_floats(experience.batch.mean_tokens(experience.advantages_R))
    try:
        context.recorder.write(step, groups, advantages=means)
        if trainer.rollout_data_dir is not None:
            dump_samples(trainer.rollout_data_folder, step, groups=groups)
    except OSError as error:
        logger.warning("rollouts of step %d are not recorded: %s", step, error)


def initial_kl_controller(config: RunConfig) -> KlController:
    """Return the controller of the KL in the reward that ``algorithm.kl_ctrl`` describes."""
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKl(control.kl_coef, control.target_kl, control.horizon)
    return FixedKl(control.kl_coef)
