# SPDX-License-Identifier: Apache-2.0
"""Composition root of ``tandem train``: from a config to a finished run.

Everything a user can have got wrong is checked before the model is loaded: loggers, data, model
folder, reward function, and (once nothing else is wrong) the run folder with its checkpoint.
Nothing here computes.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass

from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.schedule import Schedule, schedule_run
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.prompts import PromptEntry, PromptSource, load_prompts
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.driver.auxiliary_models import Beside, check_beside
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import HostedRun, Site, hosted_run, naming_step, on_site, require_fit
from tandem.driver.model_checks import length_caution, require_known_tokens
from tandem.driver.run_folder import (
    Start,
    is_logged,
    is_validated,
    last_step_to_keep,
    open_run_folder,
    write_config,
)
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.sinks import open_sinks, require_loggers
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TRACE_FILE, TraceFile, TraceRecorder
from tandem.models.folder import ModelFolder, check_folder
from tandem.models.weights import KEY
from tandem.pipeline.context import RunContext
from tandem.pipeline.loop import Pipeline, RunSummary
from tandem.pipeline.reward_phase import overlong_buffer
from tandem.rewards.custom import CustomReward
from tandem.rewards.pool import RewardLimits, RewardPool, check_reward
from tandem.rewards.routing import check_sources
from tandem.rewards.scoring import RewardSpec

logger = logging.getLogger(__name__)

MAX_ROLLOUTS_RECORDED_PER_STEP = 8
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known and checked before the run folder is touched and the model is loaded."""

    config: RunConfig
    model: ModelFolder
    beside: Beside
    codec: TextCodec
    source: PromptSource
    validation_entries: list[PromptEntry]
    schedule: Schedule


def run(config: RunConfig) -> int:
    """Train; the exit code is 0, or 128 plus the signal that stopped the run."""
    return on_site(config, lambda site: run_training(config, site).exit_code)


def run_training(config: RunConfig, site: Site) -> Ended[RunSummary]:
    """Train as ``config`` says.

    Raises:
        UserError: something in the config, the data or the model cannot work.
        RunFailure, WorkerFailure: a process of the run failed, in a step or at its start.
    """
    prepared = prepare(config)
    require_fit(site, prepared.model, key=KEY, beside=prepared.beside.folders)
    folder = open_run_folder(config.trainer, prepared.source, model=prepared.model, key=KEY)
    with folder as start:
        return execute(lambda switch: _train(prepared, start, site=site, switch=switch))


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
        chat_template=model.custom_chat_template,
        trust_remote_code=model.trust_remote_code,
    )
    by_model = config.reward_model.enable
    train_entries = load_prompts(config.data, codec, by_model=by_model)
    schedule = schedule_run(config, len(train_entries))
    validates = bool(schedule.validation_steps)
    validation_entries = (
        load_prompts(config.data, codec, validation=True, by_model=by_model) if validates else []
    )
    entries = [*train_entries, *validation_entries]
    require_known_tokens(
        (entry.token_ids for entry in entries), folder.hf_config, path=model.path, key=KEY
    )
    for warning in length_caution(config, folder.hf_config):
        logger.warning("%s", warning)
    beside = check_beside(config, folder, entries=train_entries)
    _check_reward(config, validation_entries if by_model else entries)
    source = open_source(train_entries, config.data, total_epochs=config.trainer.total_epochs)
    return Prepared(config, folder, beside, codec, source, validation_entries, schedule)


def _check_reward(config: RunConfig, entries: list[PromptEntry]) -> None:
    """Of rules and functions, which score ``entries``."""
    if not entries:
        return
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
    return RewardSpec(custom=custom, overlong=overlong_buffer(config))


def reward_limits(config: RunConfig) -> RewardLimits:
    """Processes, deadline and memory of rewards."""
    reward = config.reward
    return RewardLimits(
        num_processes=reward.num_workers,
        deadline_s=reward.timeout_s,
        memory_limit_bytes=reward.memory_limit_mb * _MEBIBYTE,
    )


async def _train(prepared: Prepared, start: Start, *, site: Site, switch: StopSwitch) -> RunSummary:
    config = prepared.config
    hosted = hosted_run(
        site,
        config,
        model=prepared.model,
        eos_ids=prepared.codec.eos_ids,
        total_steps=prepared.schedule.total_training_steps,
    )
    async with hosted as run:
        if start.checkpoint is not None:
            await run.runtime.call(run.engines.train.load, start.checkpoint.folder / "actor")
            if run.engines.critic is not None:
                folder = start.checkpoint.folder / "critic"
                await run.runtime.call(run.engines.critic.load, folder)
        async with RewardPool(reward_spec(config), reward_limits(config)) as rewards:
            parts = _assemble(prepared, start, site=site, hosted=run, rewards=rewards)
            return await _run(parts, start.checkpoint, switch=switch)


async def _run(
    parts: RunContext, checkpoint: Checkpoint | None, *, switch: StopSwitch
) -> RunSummary:
    pipeline = Pipeline(parts)
    try:
        if checkpoint is not None:
            run_folder = parts.config.trainer.run_folder
            await pipeline.restore(
                checkpoint,
                is_logged=is_logged(checkpoint, run_folder),
                is_validated=is_validated(checkpoint, run_folder),
            )
        switch.on_stop(pipeline.stop)
        with naming_step(lambda: pipeline.step):
            return await pipeline.run()
    finally:
        parts.trace.close()
        parts.recorder.close()
        for sink in parts.sinks:
            sink.close()


def _assemble(
    prepared: Prepared,
    start: Start,
    *,
    site: Site,
    hosted: HostedRun,
    rewards: RewardPool,
) -> RunContext:
    config, codec = prepared.config, prepared.codec
    run_folder = config.trainer.run_folder
    keep_through_step = last_step_to_keep(config.trainer, start.checkpoint)
    write_config(run_folder, config)
    sinks = open_sinks(
        config.trainer,
        run_folder,
        total_steps=prepared.schedule.total_training_steps,
        keep_through_step=keep_through_step,
        environment=os.environ,
        stream=sys.stdout,
    )
    recorder = RolloutRecorder(
        run_folder,
        max_per_step=MAX_ROLLOUTS_RECORDED_PER_STEP,
        token_texts=lambda ids: codec.decode([[token] for token in ids], skip_special=False),
        keep_through_step=keep_through_step,
    )
    return RunContext(
        config=config,
        schedule=prepared.schedule,
        runtime=hosted.runtime,
        engines=hosted.engines,
        source=prepared.source,
        validation_prompts=draw_by_row(prepared.validation_entries),
        codec=codec,
        rewards=rewards,
        store=start.store,
        sinks=sinks,
        recorder=recorder,
        facts=ComputeFacts(
            hosted.sizes,
            hosted.chip,
            num_devices=site.num_devices,
            num_training_devices=site.placement.pool_of("actor-train").num_devices,
        ),
        preferred_tokens=site.platform.microbatch_tokens,
        clock=time.perf_counter,
        conversations=prepared.beside.conversations,
        trace=_trace(config, resumes=start.checkpoint is not None),
        allocated_bytes=lambda: hosted.peak_memory().allocated,
        reserved_bytes=lambda: hosted.peak_memory().reserved,
    )


def _trace(config: RunConfig, *, resumes: bool) -> TraceRecorder:
    """Written to the run folder if roles work at the same time, else only summed up."""
    sink = None
    if config.trainer.max_lag > 0:
        path = config.trainer.run_folder / TRACE_FILE
        sink = TraceFile(path, clock=time.perf_counter, resumes=resumes)
    return TraceRecorder(time.perf_counter, sink=sink)
