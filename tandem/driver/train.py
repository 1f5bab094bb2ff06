# SPDX-License-Identifier: Apache-2.0
"""The composition root of ``tandem train``: from a configuration to a finished run.

All of the user's input is checked before the model is loaded: loggers, data, model folders, the
reward function, and last the run folder with its checkpoint. Nothing here computes.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.schedule import Schedule, schedule_run
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.prompts import PromptEntry, PromptSource, load_prompts
from tandem.data.tokenizer import TextCodec
from tandem.driver.auxiliary_models import (
    AuxiliaryModels,
    check_auxiliary_models,
    check_tokens,
    open_trained_model,
)
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import (
    RunningEngines,
    RunSite,
    name_step,
    require_fit,
    run_on_site,
    start_engines,
)
from tandem.driver.run_folder import (
    Start,
    is_logged,
    is_validated,
    last_step_to_keep,
    open_run_folder,
    open_run_sinks,
)
from tandem.metrics.custom import require_metrics
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.sinks import require_loggers
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TRACE_FILE, TraceFile, TraceRecorder
from tandem.models.folder import ModelFolder
from tandem.pipeline.context import RunContext
from tandem.pipeline.loop import Pipeline
from tandem.pipeline.progress import RunSummary
from tandem.pipeline.reward_phase import overlong_buffer
from tandem.rewards.custom import CustomReward
from tandem.rewards.pool import RewardLimits, RewardPool, check_reward
from tandem.rewards.routing import check_sources
from tandem.rewards.scoring import RewardSpec

logger = logging.getLogger(__name__)

MAX_ROLLOUTS_RECORDED_PER_STEP = 8
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The checked input of a run, before the run folder is opened and the model loaded."""

    config: RunConfig
    model: ModelFolder
    auxiliary: AuxiliaryModels
    codec: TextCodec
    source: PromptSource
    validation_entries: list[PromptEntry]
    schedule: Schedule


def run(config: RunConfig) -> int:
    """Train; return 0, or 128 plus the number of the signal that stopped the run."""
    return run_on_site(config, lambda site: run_training(config, site).exit_code)


def run_training(config: RunConfig, site: RunSite) -> Ended[RunSummary]:
    """Train with ``config``.

    Raises:
        UserError: the configuration, the data or a model cannot be used.
        RunFailure, WorkerFailure: a process of the run failed, in a step or at startup.
    """
    prepared = prepare(config)
    require_fit(site, prepared.model, auxiliary=prepared.auxiliary.folders)
    folder = open_run_folder(
        config.trainer, prepared.source, model=prepared.model, key=site.model.key
    )
    with folder as start:
        return execute(lambda switch: _train(prepared, start, site=site, switch=switch))


def prepare(config: RunConfig) -> PreparedRun:
    """Check and read everything but the model's weights."""
    require_loggers(config.trainer.logger)
    require_metrics(config.trainer.metrics)
    model = trained_model(config)
    folder, codec = open_trained_model(
        model, template_settings=config.data.apply_chat_template_kwargs
    )
    by_model = config.reward_model.enable
    train_entries = load_prompts(config.data, codec, by_model=by_model)
    schedule = schedule_run(config, len(train_entries))
    validates = bool(schedule.validation_steps)
    validation_entries = (
        load_prompts(config.data, codec, validation=True, by_model=by_model) if validates else []
    )
    entries = [*train_entries, *validation_entries]
    check_tokens(model, folder, token_ids=[entry.token_ids for entry in entries])
    auxiliary = check_auxiliary_models(config, folder, entries=train_entries)
    _check_reward(config, validation_entries if by_model else entries)
    source = open_source(train_entries, config.data, total_epochs=config.trainer.total_epochs)
    return PreparedRun(config, folder, auxiliary, codec, source, validation_entries, schedule)


def _check_reward(config: RunConfig, entries: list[PromptEntry]) -> None:
    """Raise UserError unless the built-in rules or the user's function can score ``entries``."""
    if not entries:
        return
    spec = reward_spec(config)
    if spec.custom is None:
        check_sources({entry.data_source for entry in entries})
    else:
        check_reward(spec, reward_limits(config))


def reward_spec(config: RunConfig) -> RewardSpec:
    """Return the reward function and the shaping of the reward."""
    function = config.custom_reward_function
    custom = None
    if function.path is not None:
        custom = CustomReward(function.path, function.name, function.reward_kwargs)
    return RewardSpec(custom=custom, overlong=overlong_buffer(config))


def reward_limits(config: RunConfig) -> RewardLimits:
    """Return the limits of the processes that compute rewards."""
    reward = config.reward
    return RewardLimits(
        num_processes=reward.num_workers,
        deadline_s=reward.timeout_s,
        memory_limit_bytes=reward.memory_limit_mb * _MEBIBYTE,
    )


async def _train(
    prepared: PreparedRun, start: Start, *, site: RunSite, switch: StopSwitch
) -> RunSummary:
    config = prepared.config
    running = start_engines(
        site,
        config,
        model=prepared.model,
        eos_ids=prepared.codec.eos_ids,
        total_steps=prepared.schedule.total_training_steps,
    )
    async with running as run:
        if start.checkpoint is not None:
            await run.runtime.call(run.engines.train.load, start.checkpoint.folder / "actor")
            if run.engines.critic is not None:
                folder = start.checkpoint.folder / "critic"
                await run.runtime.call(run.engines.critic.load, folder)
        async with RewardPool(reward_spec(config), reward_limits(config)) as rewards:
            parts = _assemble(prepared, start, site=site, running=run, rewards=rewards)
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
        with name_step(lambda: pipeline.step):
            return await pipeline.run()
    finally:
        parts.trace.close()
        parts.recorder.close()
        for sink in parts.sinks:
            sink.close()


def _assemble(
    prepared: PreparedRun,
    start: Start,
    *,
    site: RunSite,
    running: RunningEngines,
    rewards: RewardPool,
) -> RunContext:
    config, codec = prepared.config, prepared.codec
    run_folder = config.trainer.run_folder
    keep_through_step = last_step_to_keep(config.trainer, start.checkpoint)
    sinks = open_run_sinks(config, start, total_steps=prepared.schedule.total_training_steps)
    recorder = RolloutRecorder(
        run_folder,
        max_per_step=MAX_ROLLOUTS_RECORDED_PER_STEP,
        token_texts=lambda ids: codec.decode([[token] for token in ids], skip_special=False),
        keep_through_step=keep_through_step,
    )
    return RunContext(
        config=config,
        schedule=prepared.schedule,
        runtime=running.runtime,
        engines=running.engines,
        source=prepared.source,
        validation_prompts=draw_by_row(prepared.validation_entries),
        codec=codec,
        rewards=rewards,
        store=start.store,
        sinks=sinks,
        recorder=recorder,
        facts=ComputeFacts(
            running.sizes,
            running.chip,
            num_devices=site.num_devices,
            num_training_devices=site.placement.pool_of("actor-train").num_devices,
        ),
        preferred_tokens=site.platform.microbatch_tokens,
        clock=time.perf_counter,
        conversations=prepared.auxiliary.conversations,
        trace=_trace(config, resumes=start.checkpoint is not None),
        allocated_bytes=lambda: running.peak_memory().allocated,
        reserved_bytes=lambda: running.peak_memory().reserved,
    )


def _trace(config: RunConfig, *, resumes: bool) -> TraceRecorder:
    """Return a recorder, which writes to the run folder if the run is asynchronous."""
    sink = None
    if config.trainer.max_lag > 0:
        path = config.trainer.run_folder / TRACE_FILE
        sink = TraceFile(path, clock=time.perf_counter, resumes=resumes)
    return TraceRecorder(time.perf_counter, sink=sink)
