# SPDX-License-Identifier: Apache-2.0
"""The pipeline: prompts -> admission -> rollout -> reward -> advantage -> pack -> train -> release.

One program for every lag. Three tasks: the router advances the rollout engine, the producer turns
admitted prompts into scored groups, and the loop below trains on them. The loop owns the weights
version and the checkpoints. Stopping (SIGTERM, Ctrl-C) takes effect at a step boundary: what was
drawn but not trained is drawn again later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tandem.algorithms.kl import AdaptiveKl, FixedKl, KlController, next_kl_controller
from tandem.checkpoint.store import Checkpoint
from tandem.config.run import RunConfig
from tandem.metrics.records import dump_samples
from tandem.metrics.reduction import update_metrics
from tandem.metrics.timers import Timers
from tandem.pipeline.admission import AdmissionGate
from tandem.pipeline.buffer import GroupBuffer, ScoredGroup
from tandem.pipeline.experience import (
    Experience,
    PolicyScores,
    as_floats,
    assign_credit,
    lay_out,
)
from tandem.pipeline.failures import DivergenceGuard, warn_of_failed_rewards
from tandem.pipeline.parts import PipelineParts
from tandem.pipeline.policy_phase import score_with_policy, score_with_reference, update_policy
from tandem.pipeline.producer import GroupProducer
from tandem.pipeline.router import RolloutRouter
from tandem.pipeline.step_metrics import batch_metrics, speed_metrics
from tandem.pipeline.validation import summarize, validate
from tandem.types import Group, StepReport, UpdateReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended. ``validation`` holds the last validation's metrics, {} if there was none."""

    last_step: int
    stopped_early: bool
    validation: Mapping[str, float]


class Pipeline:
    """One training run over ``parts``."""

    def __init__(self, parts: PipelineParts) -> None:
        self._parts = parts
        self._config = parts.config
        self._step = self._step_under_way = 0
        self._saved_step = -1
        self._validated_step = -1
        self._controller = initial_kl_controller(parts.config)
        learning_rate = parts.config.actor_rollout_ref.actor.optim.lr
        self._divergence = DivergenceGuard("actor_rollout_ref.actor.optim.lr", learning_rate)
        self._validation: Mapping[str, float] = {}
        self._metrics: dict[str, float] = {}
        self._must_log_again = False
        self._stopping = False
        self._timers = Timers(parts.clock)
        self._step_ended_s = parts.clock()
        self._router = RolloutRouter(parts.engines.rollout, parts.runtime, clock=parts.clock)
        self._buffer = GroupBuffer()

    @property
    def step(self) -> int:
        """The training step under way, with its saving and validation; 0 before the first."""
        return self._step_under_way

    async def restore(self, checkpoint: Checkpoint, *, is_logged: bool) -> None:
        """Continue after ``checkpoint``: data, version, KL coefficient. Weights and optimizer have
        been loaded into the engines already.

        Args:
            is_logged: whether the metrics of that step are on record. A run that was killed after
                saving and before logging has left them to us.
        """
        state = checkpoint.read_state()
        self._parts.source.restore(state["data"])
        self._step = self._saved_step = self._step_under_way = checkpoint.step
        self._metrics, self._must_log_again = state["metrics"], not is_logged
        if isinstance(self._controller, AdaptiveKl):
            self._controller = replace(self._controller, coefficient=state["kl_coefficient"])
        logger.info("resumed from %s", checkpoint.folder)

    async def stop(self) -> None:
        """Ask the run to end at the next step boundary and to save there."""
        self._stopping = True
        await self._buffer.close()

    async def run(self) -> RunSummary:
        """Train to the end of the schedule or of the data, or until ``stop``."""
        total_steps = self._parts.schedule.total_training_steps
        batch_size = self._config.data.train_batch_size
        num_wanted = max(total_steps - self._step, 0) * batch_size
        ahead = 0
        gate = AdmissionGate((ahead + 1) * batch_size, num_wanted)
        producer = GroupProducer(self._parts, gate=gate, router=self._router, buffer=self._buffer)
        async with asyncio.TaskGroup() as tasks:
            watch_task = tasks.create_task(self._parts.runtime.watch())
            router_task = tasks.create_task(self._router.run())
            await self._parts.runtime.call(
                self._parts.engines.rollout.set_weights_version, self._step
            )
            if self._parts.schedule.validates_before_training and (
                self._step == 0 or self._config.trainer.val_only
            ):
                await self._validate_and_log()
            elif self._step >= total_steps:
                logger.info("step %d of %d: nothing is left to train", self._step, total_steps)
            if self._must_log_again:
                await self._log_again()
            producer_task = tasks.create_task(producer.run())
            await self._train(gate, producer)
            for task in (watch_task, router_task, producer_task):
                task.cancel()
        return RunSummary(self._step, self._stopping, self._validation)

    async def _train(self, gate: AdmissionGate, producer: GroupProducer) -> None:
        batch_size = self._config.data.train_batch_size
        schedule = self._parts.schedule
        while self._step < schedule.total_training_steps and not self._stopping:
            self._step_under_way = self._step + 1
            with self._timers.section("step"):
                begin_s = self._parts.clock()
                groups = await self._buffer.take(batch_size)
                if len(groups) < batch_size:
                    break
                self._time_rollouts(begin_s)
                experience = await self._learn(groups, producer.take_dropped())
            self._record(experience)
            if schedule.is_save_step(self._step):
                with self._timers.section("step"):
                    await self._save()
            await self._finish_step(experience)
            await gate.release_trained(batch_size)
        await self._finish()

    def _time_rollouts(self, begin_s: float) -> None:
        """Split the wait for the batch at the moment the last sequence was generated."""
        generated_s = max(self._router.last_finish_s, begin_s)
        self._timers.add("gen", generated_s - begin_s)
        self._timers.add("reward", self._parts.clock() - generated_s)

    async def _learn(self, scored: Sequence[ScoredGroup], dropped: Sequence[int]) -> Experience:
        """One training step on ``scored``; ``dropped`` draws are given up with it."""
        experience = await self._score(scored)
        groups = experience.batch.groups
        coefficient = self._controller.coefficient
        reports = await self._update(experience)
        self._step += 1
        warn_of_failed_rewards(groups, f"step {self._step}")
        self._parts.source.mark_trained([group.prompt.uid for group in groups])
        self._parts.source.mark_dropped(dropped)
        await self._sync_weights()
        self._metrics = {
            **batch_metrics(self._parts, experience, kl_coefficient=coefficient),
            **update_metrics(reports),
            "training/global_step": float(self._step),
            "training/epoch": float(self._parts.source.epoch),
            "training/dropped_groups": float(len(dropped)),
        }
        return experience

    async def _score(self, scored: Sequence[ScoredGroup]) -> Experience:
        batch = lay_out(scored)
        with self._timers.section("old_log_prob"):
            old_logp_R = await score_with_policy(self._parts, batch)
        with self._timers.section("ref"):
            ref_logp_R = await score_with_reference(self._parts, batch)
        with self._timers.section("adv"):
            return assign_credit(
                batch,
                PolicyScores(old_logp_R, ref_logp_R),
                config=self._config,
                controller=self._controller,
            )

    async def _update(self, experience: Experience) -> list[UpdateReport]:
        """Optimizer steps, unless the critic is still warming up (verl: the actor waits)."""
        self._controller = next_kl_controller(
            self._controller,
            mean_kl=experience.mean_kl,
            num_sequences=len(experience.batch.sequences),
        )
        if self._step + 1 < self._config.trainer.critic_warmup:
            return []
        with self._timers.section("update_actor"):
            reports = await update_policy(self._parts, experience)
        self._divergence.check(self._step + 1, reports)
        return reports

    async def _sync_weights(self) -> None:
        with self._timers.section("update_weights"):
            await self._parts.runtime.call(
                self._parts.engines.rollout.set_weights_version, self._step
            )

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
            self._parts.store.writing(self._step, state) as folder,
        ):
            (folder / "actor").mkdir()
            await self._parts.runtime.call(self._parts.engines.train.save, folder / "actor")
            self._parts.codec.save_own_template(folder / "actor")
        self._saved_step = self._step

    async def _finish_step(self, experience: Experience) -> None:
        """Validate if it is due, and log the step."""
        metrics = dict(self._metrics)
        if self._parts.schedule.is_test_step(self._step):
            metrics.update(await self._validate())
        now_s = self._parts.clock()
        wall_s, self._step_ended_s = now_s - self._step_ended_s, now_s
        seconds = self._timers.take()
        metrics.update(speed_metrics(self._parts, experience, seconds=seconds, wall_s=wall_s))
        self._log(metrics)

    def _record(self, experience: Experience) -> None:
        """Keep some rollouts for the report; a record that cannot be written stops nothing."""
        groups, trainer = experience.batch.groups, self._config.trainer
        means = as_floats(experience.batch.mean_tokens(experience.columns.advantages_R))
        try:
            self._parts.recorder.write(self._step, groups, advantages=means)
            if trainer.rollout_data_dir is not None:
                dump_samples(trainer.rollout_data_folder, self._step, groups=groups)
        except OSError as error:
            logger.warning("rollouts of step %d are not recorded: %s", self._step, error)

    async def _validate(self) -> Mapping[str, float]:
        with self._timers.section("testing"):
            groups = await validate(self._parts, self._router)
        warn_of_failed_rewards(groups, f"validation of step {self._step}")
        self._dump_validation(groups)
        self._validation = summarize(groups)
        self._validated_step = self._step
        return self._validation

    def _dump_validation(self, groups: Sequence[Group]) -> None:
        trainer = self._config.trainer
        for group in groups[: trainer.log_val_generations]:
            sample = group.samples[0]
            logger.info(
                "validation %r -> %r: %g", group.prompt.text, sample.text, sample.reward.score
            )
        if trainer.validation_data_dir is None:
            return
        try:
            dump_samples(trainer.validation_data_folder, self._step, groups=groups)
        except OSError as error:
            logger.warning("validation of step %d is not dumped: %s", self._step, error)

    async def _validate_and_log(self) -> None:
        metrics = {**await self._validate(), "training/global_step": float(self._step)}
        metrics.update({f"timing_s/{name}": value for name, value in self._timers.take().items()})
        self._log(metrics)
        self._step_ended_s = self._parts.clock()

    async def _log_again(self) -> None:
        """The step we resumed from, all but its times, which are lost."""
        metrics = dict(self._metrics)
        if self._parts.schedule.is_test_step(self._step):
            metrics.update(await self._validate())
        self._timers.take()
        self._log(metrics)
        self._step_ended_s = self._parts.clock()

    def _log(self, metrics: Mapping[str, float]) -> None:
        report = StepReport(self._step, metrics)
        for sink in self._parts.sinks:
            sink.write(report)

    async def _finish(self) -> None:
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
            if 0 < self._step != self._validated_step and self._parts.schedule.test_freq > 0:
                await self._validate_and_log()
        wants_save = self._stopping or (early and self._config.trainer.save_freq > 0)
        if wants_save and self._step > 0 and self._saved_step != self._step:
            await self._save()


def initial_kl_controller(config: RunConfig) -> KlController:
    """The coefficient of the KL in the reward, as ``algorithm.kl_ctrl`` describes it."""
    control = config.algorithm.kl_ctrl
    if control.type == "adaptive":
        return AdaptiveKl(control.kl_coef, control.target_kl, control.horizon)
    return FixedKl(control.kl_coef)
