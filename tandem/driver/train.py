# SPDX-License-Identifier: Apache-2.0
"""``tandem train``: its checked input, its engines and the pipeline that runs it.

All of the user's input is checked before the model is loaded. Nothing here computes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from tandem.api import Engines, WorkerGroup
from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.adapters import Adapters
from tandem.config.derived.schedule import schedule_run
from tandem.config.derived.sizes import ModelSizes
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.run import RunConfig
from tandem.data.ledger import Source, draw_by_row, open_ledger
from tandem.data.prompts import load_prompts, open_prompts
from tandem.data.rendering import PromptEntry
from tandem.data.tokenizer import TextCodec
from tandem.driver.agent_facts import describe_agents
from tandem.driver.agents import AgentPlan, open_agents, plays_episodes, prepare_agents
from tandem.driver.auxiliary_models import (
    check_auxiliary_models,
    check_tokens,
    open_trained_model,
)
from tandem.driver.engine_choice import require_engine
from tandem.driver.launch import run_on_site
from tandem.driver.model_checks import require_end
from tandem.driver.pictures import picture_rule
from tandem.driver.rewards import check_own_rewards, check_rewards, open_rewards
from tandem.driver.run import LaunchedRun, Observer, PreparedRun, run_to_end
from tandem.driver.run_folder import (
    begin_records,
    is_logged,
    is_validated,
    last_step_to_keep,
    open_run_sinks,
)
from tandem.metrics.activity import Activity
from tandem.metrics.custom import require_metrics
from tandem.metrics.records import RolloutRecorder
from tandem.metrics.sinks import require_loggers
from tandem.metrics.throughput import ComputeFacts
from tandem.metrics.trace import TRACE_FILE, TraceFile, TraceRecorder
from tandem.models.decoder import DecoderConfig
from tandem.pipeline.context import Rewards, RunContext
from tandem.pipeline.conversing import Conversing
from tandem.pipeline.loop import Pipeline
from tandem.workers.colocated import build_colocated
from tandem.workers.deployment import remote_engines
from tandem.workers.remote import PeakMemory
from tandem.workers.shared_base import RunOverBase

logger = logging.getLogger(__name__)

MAX_ROLLOUTS_RECORDED_PER_STEP = 8


@dataclass(frozen=True, slots=True)
class RunningEngines:
    """The engines of a run.

    Attributes:
        chip: the name of the device that trains.
        peak_memory: returns the peak memory of the devices that train.
    """

    engines: Engines
    chip: str
    peak_memory: Callable[[], PeakMemory]


def run(config: RunConfig, *, observer: Observer | None = None) -> int:
    """Train; return 0, or 128 plus the number of the signal that stopped the run."""
    seen_by = observer or Observer()
    return run_on_site(
        config,
        lambda site: run_to_end(site, prepare(config), observer=seen_by),
        will_restart=seen_by.will_restart,
    )


def prepare(
    config: RunConfig, *, fetches_weights: bool = True, over: RunOverBase | None = None
) -> PreparedRun:
    """Check and read everything but the model's weights.

    Args:
        fetches_weights: whether weights that are only on the hub are downloaded.
        over: the base that the run shares with others of this process; None loads one.

    Raises:
        UserError: the configuration, the data or a model cannot be used.
    """
    require_loggers(config.trainer.logger)
    require_metrics(config.trainer.metrics)
    model = trained_model(config)
    folder, codec = open_trained_model(
        model,
        template_settings=config.data.apply_chat_template_kwargs,
        fetches_weights=fetches_weights,
    )
    rollout = config.actor_rollout_ref.rollout
    for warning in require_end(codec.eos_ids, rollout, model=model, hf_config=folder.hf_config):
        logger.warning("%s", warning)
    require_engine(config, folder.hf_config)
    by_model = config.reward_model.enable
    pictures = picture_rule(config, folder, codec=codec)
    agents = prepare_agents(config, codec)
    kinds: dict[str, Any] = {
        "by_model": by_model,
        "by_function": bool(config.custom_reward_function.path),
        "agents": None if agents is None else agents.rule,
        "pictures": pictures,
    }
    train = open_prompts(config.data, codec, **kinds)
    schedule = schedule_run(config, len(train.rows))
    validates = bool(schedule.validation_steps)
    validation = load_prompts(config.data, codec, validation=True, **kinds) if validates else []
    rendered = [*train.examples, *validation]
    check_tokens(model, folder, token_ids=[entry.text_ids for entry in rendered])
    auxiliary = check_auxiliary_models(
        config, folder, entries=train.examples, fetches_weights=fetches_weights
    )
    rows = [*train.rows, *validation]
    scored = validation if by_model else rows
    check_rewards(config, scored if agents is None else agents.without_own_reward(scored))
    if agents is not None:
        own = agents.rule.programs
        check_own_rewards(config, train=train.rows, validation=validation, gives_reward=own)
    logger.info("%d prompts to train on, %d to validate with", len(train.rows), len(validation))
    ledger = open_ledger(train.rows, config.data, total_epochs=config.trainer.total_epochs)
    source = Source(train.read, ledger)
    open_loop = partial(
        _open_loop,
        validation=validation,
        conversations=auxiliary.conversations,
        agents=agents if plays_episodes(agents, rows) else None,
        over=over,
    )
    described = describe_agents(agents, codec=codec, train=train.rows, validation=validation)
    return PreparedRun(folder, codec, source, schedule, open_loop, auxiliary.folders, described)


@asynccontextmanager
async def _open_loop(
    run: LaunchedRun,
    *,
    validation: Sequence[PromptEntry],
    conversations: TextCodec | None,
    agents: AgentPlan | None,
    over: RunOverBase | None,
) -> AsyncIterator[Pipeline]:
    config, checkpoint, runtime = run.site.config, run.start.checkpoint, run.runtime
    assert isinstance(config, RunConfig), "the site is that of this command"
    async with _open_engines(config, run, over=over) as running:
        if checkpoint is not None:
            await runtime.call(running.engines.train.load, checkpoint.folder / "actor")
            if running.engines.critic is not None:
                await runtime.call(running.engines.critic.load, checkpoint.folder / "critic")
        begin_records(config, run.start)
        opened = open_agents(config, agents, codec=run.prepared.codec)
        async with open_rewards(config) as rewards, opened as conversing:
            parts = _assemble(
                config,
                run,
                running=running,
                rewards=rewards,
                validation=validation,
                conversations=conversations,
                conversing=conversing,
            )
            pipeline = Pipeline(parts)
            try:
                await _restore(pipeline, checkpoint, run_folder=config.trainer.run_folder)
                yield pipeline
            finally:
                _close(parts)


async def _restore(pipeline: Pipeline, checkpoint: Checkpoint | None, *, run_folder: Path) -> None:
    if checkpoint is not None:
        await pipeline.restore(
            checkpoint,
            is_logged=is_logged(checkpoint, run_folder),
            is_validated=is_validated(checkpoint, run_folder),
        )


def _close(parts: RunContext) -> None:
    parts.trace.close()
    parts.recorder.close()
    for sink in parts.sinks:
        sink.close()


@asynccontextmanager
async def _open_engines(
    config: RunConfig, run: LaunchedRun, *, over: RunOverBase | None
) -> AsyncIterator[RunningEngines]:
    runtime, placement, platform = run.runtime, run.site.placement, run.site.platform
    if run.groups is None:
        engines = await runtime.call(
            build_colocated,
            config,
            placement,
            platform=platform,
            eos_ids=run.prepared.codec.eos_ids,
            total_steps=run.prepared.schedule.total_training_steps,
            over=over,
        )
        try:
            peak = partial(PeakMemory.of, platform)
            yield RunningEngines(engines, platform.device_name(), peak)
        finally:
            await runtime.call(engines.close)
        return
    rollout = config.actor_rollout_ref.rollout
    engines, peak = await runtime.call(remote_engines, run.groups, placement, rollout=rollout)
    chip = await runtime.call(_chip, run.groups[placement.pool_of("actor-train").name])
    yield RunningEngines(engines, chip, peak)


def _chip(group: WorkerGroup) -> str:
    """Return the name of the group's devices."""
    return group.gather([group.submit(0, "describe")])[0]["chip"]


def _assemble(
    config: RunConfig,
    run: LaunchedRun,
    *,
    running: RunningEngines,
    rewards: Rewards,
    validation: Sequence[PromptEntry],
    conversations: TextCodec | None,
    conversing: Conversing | None,
) -> RunContext:
    start, site, prepared = run.start, run.site, run.prepared
    codec = prepared.codec
    total_steps = prepared.schedule.total_training_steps
    activity = Activity()
    sinks = open_run_sinks(config.trainer, start, total_steps=total_steps, activity=activity)
    recorder = RolloutRecorder(
        config.trainer.run_folder,
        max_per_step=MAX_ROLLOUTS_RECORDED_PER_STEP,
        token_texts=lambda ids: codec.decode([[token] for token in ids], skip_special=False),
        keep_through_step=last_step_to_keep(config.trainer, start.checkpoint),
    )
    decoder = prepared.model.decoder_config
    return RunContext(
        config=config,
        schedule=prepared.schedule,
        runtime=run.runtime,
        engines=running.engines,
        source=prepared.source,
        validation_prompts=partial(draw_by_row, validation),
        codec=codec,
        rewards=rewards,
        store=start.store,
        sinks=(*sinks, *run.sinks),
        recorder=recorder,
        facts=ComputeFacts(
            None
            if decoder is None
            else _sizes_of(decoder, adapters=trained_model(config).adapters),
            running.chip,
            num_devices=site.num_devices,
            num_training_devices=site.placement.pool_of("actor-train").num_devices,
        ),
        preferred_tokens=site.platform.microbatch_tokens,
        clock=time.perf_counter,
        conversations=conversations,
        conversing=conversing,
        trace=_trace(config, resumes=start.checkpoint is not None),
        activity=activity,
        allocated_bytes=lambda: running.peak_memory().allocated,
        reserved_bytes=lambda: running.peak_memory().reserved,
    )


def _sizes_of(config: DecoderConfig, *, adapters: Adapters | None) -> ModelSizes:
    sizes = ModelSizes(
        num_layers=config.num_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        vocabulary=config.vocab_size,
        tied=config.tie_embeddings,
        experts=config.experts,
        tower=0 if config.vision is None else config.vision.num_parameters,
        latent=config.latent,
    )
    if adapters is None:
        return sizes
    return replace(sizes, adapters=adapters.num_parameters(sizes))


def _trace(config: RunConfig, *, resumes: bool) -> TraceRecorder:
    """Return a recorder, which writes to the run folder if the run is asynchronous."""
    sink = None
    if config.trainer.max_lag > 0:
        path = config.trainer.run_folder / TRACE_FILE
        sink = TraceFile(path, clock=time.perf_counter, resumes=resumes)
    return TraceRecorder(time.perf_counter, sink=sink)
