# SPDX-License-Identifier: Apache-2.0
"""Composition root of ``tandem train``: from a config to a finished run.

Everything a user can have got wrong is checked before the model is loaded: loggers, data, model
folder, reward function, checkpoint. Nothing here computes.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from dataclasses import dataclass

from tandem.checkpoint.resume import find_checkpoint
from tandem.checkpoint.store import Checkpoint, CheckpointStore
from tandem.cli.execution import Ended, StopSwitch, execute
from tandem.cli.run_folder import is_logged, require_fitting, require_writable, write_config
from tandem.config.run import RunConfig
from tandem.config.schedule import Schedule, schedule_run
from tandem.data.prompts import (
    PromptEntry,
    PromptSource,
    load_prompts,
    open_source,
    validation_prompts,
)
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.metrics.jsonl import BEFORE_FIRST_STEP
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.sinks import open_sinks, require_loggers
from tandem.metrics.throughput import ComputeFacts
from tandem.models.folder import check_folder
from tandem.models.weights import KEY
from tandem.pipeline.loop import Pipeline, RunSummary
from tandem.pipeline.parts import Engines, PipelineParts
from tandem.platforms.record import Platform
from tandem.platforms.select import select_platform
from tandem.rewards.custom import CustomReward
from tandem.rewards.pool import RewardLimits, RewardPool, check_reward
from tandem.rewards.routing import check_sources
from tandem.rewards.scoring import RewardSpec
from tandem.rewards.shaping import OverlongBuffer
from tandem.runtime.inprocess import InProcessRuntime
from tandem.workers.colocated import ColocatedEngines, build_colocated

logger = logging.getLogger(__name__)

MAX_ROLLOUTS_RECORDED_PER_STEP = 8
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known and checked before the model is loaded."""

    config: RunConfig
    codec: TextCodec
    source: PromptSource
    validation_entries: list[PromptEntry]
    schedule: Schedule
    store: CheckpointStore
    checkpoint: Checkpoint | None


def run_training(config: RunConfig) -> Ended[RunSummary]:
    """Train as ``config`` says.

    Raises:
        UserError: something in the config, the data or the model cannot work.
    """
    prepared = prepare(config)
    return execute(lambda switch: _train(prepared, switch))


def prepare(config: RunConfig) -> Prepared:
    """Check and read everything but the model's weights."""
    require_loggers(config.trainer.logger)
    model = config.actor_rollout_ref.model
    folder = check_folder(
        model.path,
        trust_remote_code=model.trust_remote_code,
        load_weight=config.actor_rollout_ref.actor.load_weight,
    )
    codec = load_codec(
        model.path,
        template_settings=config.data.apply_chat_template_kwargs,
        trust_remote_code=model.trust_remote_code,
    )
    train_entries = load_prompts(config.data, codec)
    schedule = schedule_run(config, len(train_entries))
    validates = bool(schedule.validation_steps)
    validation_entries = load_prompts(config.data, codec, validation=True) if validates else []
    _check_reward(config, [*train_entries, *validation_entries])
    store = CheckpointStore(config.trainer.run_folder, config.trainer.max_actor_ckpt_to_keep)
    checkpoint = find_checkpoint(config.trainer, store)
    source = open_source(train_entries, config.data, total_epochs=config.trainer.total_epochs)
    if checkpoint is not None:
        require_fitting(checkpoint, source, model=folder, key=KEY)
    require_writable(store.folder)
    return Prepared(config, codec, source, validation_entries, schedule, store, checkpoint)


def _check_reward(config: RunConfig, entries: list[PromptEntry]) -> None:
    spec = reward_spec(config)
    if spec.custom is None:
        check_sources({entry.data_source for entry in entries})
    else:
        check_reward(spec, reward_limits(config))


def reward_spec(config: RunConfig) -> RewardSpec:
    """Which reward, and how it is shaped."""
    function = config.custom_reward_function
    custom = None
    if function.path is not None:
        custom = CustomReward(function.path, function.name, function.reward_kwargs)
    manager = config.reward_model.reward_kwargs
    overlong = None
    if config.reward_model.reward_manager == "dapo" and manager.overlong_buffer_cfg.enable:
        overlong = OverlongBuffer(
            max_tokens=manager.max_resp_len or config.data.max_response_length,
            buffer_tokens=manager.overlong_buffer_cfg.len,
            penalty_factor=manager.overlong_buffer_cfg.penalty_factor,
            log=manager.overlong_buffer_cfg.log,
        )
    return RewardSpec(custom=custom, overlong=overlong)


def reward_limits(config: RunConfig) -> RewardLimits:
    """Processes, deadline and memory of rewards."""
    reward = config.reward
    return RewardLimits(
        num_processes=reward.num_workers,
        deadline_s=reward.timeout_s,
        memory_limit_bytes=reward.memory_limit_mb * _MEBIBYTE,
    )


async def _train(prepared: Prepared, switch: StopSwitch) -> RunSummary:
    config = prepared.config
    platform = select_platform(config.trainer.device)
    runtime = InProcessRuntime(platform.prepare_thread)
    try:
        engines = await runtime.call(
            build_colocated,
            config,
            platform=platform,
            eos_ids=prepared.codec.eos_ids,
            total_steps=prepared.schedule.total_training_steps,
        )
        if prepared.checkpoint is not None:
            await runtime.call(engines.train.load, prepared.checkpoint.folder / "actor")
        async with RewardPool(reward_spec(config), reward_limits(config)) as rewards:
            parts = _assemble(
                prepared, runtime=runtime, platform=platform, engines=engines, rewards=rewards
            )
            return await _run(parts, prepared.checkpoint, switch=switch)
    finally:
        await runtime.close()


async def _run(
    parts: PipelineParts, checkpoint: Checkpoint | None, *, switch: StopSwitch
) -> RunSummary:
    pipeline = Pipeline(parts)
    try:
        if checkpoint is not None:
            run_folder = parts.config.trainer.run_folder
            await pipeline.restore(checkpoint, is_logged=is_logged(checkpoint, run_folder))
        switch.on_stop(pipeline.stop)
        return await pipeline.run()
    finally:
        parts.recorder.close()
        for sink in parts.sinks:
            sink.close()


def _assemble(
    prepared: Prepared,
    *,
    runtime: InProcessRuntime,
    platform: Platform,
    engines: ColocatedEngines,
    rewards: RewardPool,
) -> PipelineParts:
    config, codec = prepared.config, prepared.codec
    run_folder = config.trainer.run_folder
    resume_step = None if prepared.checkpoint is None else prepared.checkpoint.step
    write_config(run_folder, config)
    sinks = open_sinks(
        config.trainer,
        run_folder,
        total_steps=prepared.schedule.total_training_steps,
        resume_step=resume_step,
        environment=os.environ,
        stream=sys.stdout,
    )
    recorder = RolloutRecorder(
        run_folder,
        max_per_step=MAX_ROLLOUTS_RECORDED_PER_STEP,
        token_text=functools.cache(
            lambda token: codec.decode([[token]], skip_special=False)[0],
        ),
        keep_through_step=BEFORE_FIRST_STEP if resume_step is None else resume_step,
    )
    return PipelineParts(
        config=config,
        schedule=prepared.schedule,
        runtime=runtime,
        engines=Engines(engines.train, engines.rollout, engines.reference),
        source=prepared.source,
        validation_prompts=validation_prompts(prepared.validation_entries),
        codec=codec,
        rewards=rewards,
        store=prepared.store,
        sinks=sinks,
        recorder=recorder,
        facts=ComputeFacts(engines.shape, platform.device_name(), num_devices=1),
        preferred_tokens=platform.microbatch_tokens,
        clock=time.perf_counter,
        allocated_bytes=platform.memory_allocated_bytes,
        reserved_bytes=platform.memory_reserved_bytes,
    )
