# SPDX-License-Identifier: Apache-2.0
"""The pipeline: prompts -> admission -> rollout -> reward -> advantage -> pack -> train -> release.

One program for every lag. The tasks: the rollout loop advances the engine, the producer turns
admitted prompts into scored groups, one task prepares the next batch, the loop below trains on it,
the weight flow brings its weights to the rollout, validations run beside, the journal writes what
came of each step. The loop owns the training step, which is the weights version, and the
checkpoints. Stopping (SIGTERM, Ctrl-C) takes effect at a step boundary: what was drawn but not
trained is drawn again later, and a validation under way is dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tandem.algorithms.kl import AdaptiveKl, FixedKl, KlController, next_kl_controller
from tandem.checkpoint.store import Checkpoint
from tandem.config.schema.run import RunConfig
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
from tandem.pipeline.step_metrics import batch_metrics, speed_metrics
from tandem.pipeline.tasks import Stages, batch_rule
from tandem.types import UpdateReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended. ``validation`` holds the last validation's metrics, {} if there was none."""

    last_step: int
    stopped_early: bool
    validation: Mapping[str, float]


class Pipeline:
    """One training run over ``parts``."""

    def __init__(self, parts: RunContext) -> None:
        self._parts = parts
        self._config = parts.config
        self._step = self._step_under_way = 0
        self._saved_step = -1
        self._controller = initial_kl_controller(parts.config)
        learning_rate = parts.config.actor_rollout_ref.actor.optim.lr
        self._divergence = DivergenceGuard("actor_rollout_ref.actor.optim.lr", learning_rate)
        self._critic_divergence = DivergenceGuard(
            "critic.optim.lr", parts.config.critic.optim.lr, model="critic"
        )
        self._metrics: dict[str, float] = {}
        self._must_log_again = False
        self._validated_step = 0
        self._stopping = False
        self._timers = Timers(parts.clock)
        self._step_ended_s = parts.clock()
        self._buffer = GroupBuffer(batch_rule(parts.config))
        self._stages: Stages | None = None
        self._open_row: asyncio.Future[Mapping[str, float]] | None = None

    @property
    def step(self) -> int:
        """The training step under way, with its saving and validation; 0 before the first."""
        return self._step_under_way

    async def restore(
        self, checkpoint: Checkpoint, *, is_logged: bool, is_validated: bool = True
    ) -> None:
        """Continue after ``checkpoint``: data, version, KL coefficient. Weights and optimizer have
        been loaded into the engines already.

        Args:
            is_logged: whether the metrics of that step are on record. A run that was killed after
                saving and before logging has left them to us.
            is_validated: whether a validation of that step is on record. One that was due and
                under way when a run failed is made up for.
        """
        state = checkpoint.read_state()
        self._parts.source.restore(state["data"])
        self._step = self._saved_step = self._step_under_way = checkpoint.step
        self._metrics, self._must_log_again = state["metrics"], not is_logged
        self._validated_step = checkpoint.step if is_validated else -1
        if isinstance(self._controller, AdaptiveKl):
            self._controller = replace(self._controller, coefficient=state["kl_coefficient"])
        logger.info("resumed from %s", checkpoint.folder)

    async def stop(self) -> None:
        """Ask the run to end at the next step boundary and to save there."""
        self._stopping = True
        await self._buffer.close()
        if self._stages is not None:
            await self._stages.abandon()

    async def run(self) -> RunSummary:
        """Train to the end of the schedule or of the data, or until ``stop``."""
        async with asyncio.TaskGroup() as tasks:
            stages = Stages(self._parts, self._buffer, tasks=tasks, step=self._step)
            self._stages = stages
            await stages.flow.start()
            await self._log_beginning(stages)
            stages.produce()
            await self._train(stages)
            await stages.journal.flush()
            stages.close()
        return RunSummary(self._step, self._stopping, stages.validator.metrics)

    async def _log_beginning(self, stages: Stages) -> None:
        """The validation before training, and what of its step a resumed run has not logged."""
        schedule = self._parts.schedule
        total_steps = schedule.total_training_steps
        validates = schedule.validates_before_training and (
            self._step == 0 or self._config.trainer.val_only
        )
        if validates:
            await self._log(stages, {}, validates=True)
        elif self._step >= total_steps:
            logger.info("step %d of %d: nothing is left to train", self._step, total_steps)
        is_due = schedule.is_test_step(self._step)
        if self._must_log_again:
            await self._log(stages, self._metrics, validates=is_due)
        elif self._step != self._validated_step and is_due and not validates:
            await self._log(stages, {}, validates=True)

    async def _train(self, stages: Stages) -> None:
        total_steps = self._parts.schedule.total_training_steps
        upcoming = stages.prepare(self._step) if self._step < total_steps else None
        while upcoming is not None and not self._stopping:
            self._step_under_way = self._step + 1
            with self._timers.section("step"):
                batch = await self._next_batch(upcoming)
                if batch is None:
                    break
                more = self._step + 1 < total_steps
                upcoming = stages.prepare(self._step + 1) if more else None
                experience = await self._learn(batch, stages)
                if experience is None:
                    break
            await self._end_step(experience, stages)
        await self._finish(stages)

    async def _next_batch(self, upcoming: asyncio.Task[Batch | None]) -> Batch | None:
        """The next batch; None if there is none, or the run is to stop. Its wait is split at the
        moments when its last sequence was generated, and scored.
        """
        begin_s = self._parts.clock()
        with self._parts.trace.waiting("actor-train", "batch"):
            batch = await upcoming
        if batch is None or self._stopping:
            return None
        self._close_row({})
        generated_s = max(batch.generated_s, begin_s)
        self._timers.add("gen", generated_s - begin_s)
        self._timers.add("reward", max(batch.taken_s - generated_s, 0.0))
        return batch

    async def _learn(self, batch: Batch, stages: Stages) -> Experience | None:
        """One training step, and its weights on their way; None if the run is to stop before."""
        groups = batch.groups
        require_fresh(groups, version=self._step, max_lag=self._config.trainer.max_lag)
        dropped = stages.producer.take_dropped()
        with self._parts.trace.waiting("actor-train", "sync"):
            await stages.flow.begin_training()
        if self._stopping:
            return None
        experience = await self._credit(batch)
        coefficient = self._controller.coefficient
        updating = stages.tasks.create_task(self._update_models(experience))
        await asyncio.sleep(0)  # the update is under way, and this thread free
        record_rollouts(self._parts, experience, step=self._step + 1)
        described = batch_metrics(self._parts, experience, kl_coefficient=coefficient)
        updated = await updating
        self._step += 1
        warn_of_failed_rewards(groups, f"step {self._step}")
        self._parts.source.mark_trained([group.prompt.uid for group in groups])
        self._parts.source.mark_dropped(dropped)
        await self._offer_weights(stages)
        self._metrics = {
            **described,
            **updated,
            "training/global_step": float(self._step),
            "training/epoch": float(self._parts.source.epoch),
            "training/dropped_groups": float(len(dropped)),
        }
        return experience

    async def _credit(self, batch: Batch) -> Experience:
        batch = await finish_scoring(self._parts, batch)
        for name, seconds in batch.seconds.items():
            self._timers.add(name, seconds)
        with self._timers.section("adv"):
            return assign_credit(batch, config=self._config, controller=self._controller)

    async def _update_models(self, experience: Experience) -> dict[str, float]:
        """All optimizer steps on one batch; their metrics."""
        critic_reports = await self._update_critic(experience)
        reports = await self._update(experience)
        return update_metrics(critic_reports, "critic") | update_metrics(reports)

    async def _update_critic(self, experience: Experience) -> list[UpdateReport]:
        """Its optimizer steps; none without a critic."""
        if self._parts.engines.critic is None:
            return []
        span = self._parts.trace.span("actor-train", "update critic")
        with self._timers.section("update_critic"), span:
            reports = await update_critic(self._parts, experience)
        self._critic_divergence.check(self._step + 1, reports)
        return reports

    async def _update(self, experience: Experience) -> list[UpdateReport]:
        """Optimizer steps, unless the critic is still warming up (verl: the actor waits)."""
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
            self._parts.trace.span("actor-train", "update", details=details),
        ):
            reports = await update_policy(self._parts, experience)
        self._divergence.check(self._step + 1, reports)
        return reports

    async def _offer_weights(self, stages: Stages) -> None:
        """Those of a validation and the last ones are waited for."""
        is_last = self._step == self._parts.schedule.total_training_steps
        is_required = is_last or self._parts.schedule.is_test_step(self._step)
        waiting = self._parts.trace.waiting("actor-train", "sync")
        with self._timers.section("update_weights"), waiting:
            await stages.flow.publish(self._step, is_required=is_required)

    async def _end_step(self, experience: Experience, stages: Stages) -> None:
        """Save, validate and log, whatever of it is due."""
        schedule = self._parts.schedule
        if schedule.is_save_step(self._step):
            with self._timers.section("step"):
                await stages.journal.flush()
                await self._save()
        validates = schedule.is_test_step(self._step)
        await self._log(stages, self._metrics, validates=validates, experience=experience)
        if self._config.trainer.lockstep:
            await stages.gate.release_trained(self._config.data.train_batch_size)

    async def _save(self) -> None:
        state = {
            "step": self._step,
            "weights_version": self._step,
            "data": self._parts.source.state(),
            "kl_coefficient": self._controller.coefficient,
            "metrics": self._metrics,
        }
        with (
            self._timers.section("save_checkpoint"),
            self._parts.trace.span("actor-train", "save", details={"step": self._step}),
            self._parts.store.writing(self._step, state) as folder,
        ):
            await save_models(self._parts, folder)
        self._saved_step = self._step

    async def _log(
        self,
        stages: Stages,
        metrics: Mapping[str, float],
        *,
        validates: bool,
        experience: Experience | None = None,
    ) -> None:
        """The row of this step; without ``experience`` it has no speed but decoding's. In rounds
        its validation is waited for. Where nobody can know yet that it is the last one and due for
        a validation, it stays open until the next batch is there.
        """
        validation = None
        if validates and not self._stopping:
            validation = stages.validator.start(stages.tasks)
            if self._config.trainer.lockstep:
                await validation
        elif not self._stopping and may_be_last(self._parts, self._step):
            validation = self._open_row = asyncio.get_running_loop().create_future()
        now_s = self._parts.clock()
        wall_s, self._step_ended_s = now_s - self._step_ended_s, now_s
        seconds = self._timers.take()
        row = {**metrics, **stages.pace.take()}
        if experience is not None:
            row |= speed_metrics(self._parts, experience, seconds=seconds, wall_s=wall_s)
            row |= stages.rollout.take_metrics()
        if experience is not None and self._config.trainer.max_lag > 0:
            row |= self._parts.trace.take_step(self._step)
        stages.journal.add(self._step, row, validation=validation)
        if self._config.trainer.lockstep and self._open_row is None:
            await stages.journal.flush()

    def _close_row(self, validated: Mapping[str, float]) -> None:
        """What the row that was left open waits for, if there is one."""
        if self._open_row is not None:
            self._open_row.set_result(validated)
            self._open_row = None

    async def _finish(self, stages: Stages) -> None:
        """What the last step gets, if nobody knew that it was the last: validation and saving."""
        total_steps = self._parts.schedule.total_training_steps
        early = self._step < total_steps
        if early and not self._stopping:
            logger.warning(
                "the data ended at step %d of %d, because dropped groups used it up; raise "
                "trainer.total_epochs",
                self._step,
                total_steps,
            )
            await stages.flow.wait_in_use()
            is_validated = self._step in (self._validated_step, stages.validator.step)
            if self._open_row is not None and not self._stopping:
                self._close_row(await stages.validator.start(stages.tasks))
            elif not is_validated and self._parts.schedule.test_freq > 0:
                await self._log(stages, {}, validates=True)
        self._close_row({})
        wants_save = self._stopping or (early and self._config.trainer.save_freq > 0)
        if wants_save and self._step > 0 and self._saved_step != self._step:
            await self._save()


def may_be_last(parts: RunContext, step: int) -> bool:
    """Whether dropped groups could use up the data before the batch after ``step``, and a
    validation would then be due.
    """
    schedule, drops = parts.schedule, parts.config.algorithm.filter_groups.enable
    return drops and step < schedule.total_training_steps and schedule.test_freq > 0


async def save_models(parts: RunContext, folder: Path) -> None:
    """Weights and optimizers of what is trained."""
    (folder / "actor").mkdir()
    await parts.runtime.call(parts.engines.train.save, folder / "actor")
    parts.codec.save_own_template(folder / "actor")
    if parts.engines.critic is not None:
        (folder / "critic").mkdir()
        await parts.runtime.call(parts.engines.critic.save, folder / "critic")


def record_rollouts(parts: RunContext, experience: Experience, *, step: int) -> None:
    """Keep some for the report; a record that cannot be written stops nothing."""
    groups, trainer = experience.batch.groups, parts.config.trainer
    means = as_floats(experience.batch.mean_tokens(experience.advantages_R))
    try:
        parts.recorder.write(step, groups, advantages=means)
        if trainer.rollout_data_dir is not None:
            dump_samples(trainer.rollout_data_folder, step, groups=groups)
    except OSError as error:
        logger.warning("rollouts of step %d are not recorded: %s", step, error)


def initial_kl_controller(config: RunConfig) -> KlController:
    """The coefficient of the KL in the reward, as ``algorithm.kl_ctrl`` describes it."""
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKl(control.kl_coef, control.target_kl, control.horizon)
    return FixedKl(control.kl_coef)
