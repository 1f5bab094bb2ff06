# SPDX-License-Identifier: Apache-2.0
"""The composition root of ``tandem sft``: from a configuration to a finished fine-tuning run."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tandem.config.derived.schedule import Schedule, schedule_sft
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.sft import SftConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.sft import SftExample, SftSource, load_sft_examples
from tandem.data.tokenizer import TextCodec
from tandem.driver.auxiliary_models import check_tokens, open_trained_model
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import (
    RunningTrainer,
    RunSite,
    name_step,
    require_fit,
    run_on_site,
    start_trainer,
)
from tandem.driver.run_folder import (
    Start,
    is_logged,
    open_run_folder,
    open_run_sinks,
)
from tandem.metrics.sinks import require_loggers
from tandem.models.folder import ModelFolder
from tandem.pipeline.progress import RunSummary
from tandem.pipeline.supervised import SupervisedContext, SupervisedLoop


@dataclass(frozen=True, slots=True)
class PreparedSft:
    """The checked input of a run, before the run folder is opened and the model loaded."""

    config: SftConfig
    model: ModelFolder
    codec: TextCodec
    source: SftSource
    validation: list[SftExample]
    schedule: Schedule


def run(config: SftConfig) -> int:
    """Train the model; return 0, or 128 plus the number of the signal that stopped the run."""
    return run_on_site(config, lambda site: run_supervised(config, site).exit_code)


def run_supervised(config: SftConfig, site: RunSite) -> Ended[RunSummary]:
    """Train the model with ``config``.

    Raises:
        UserError: the configuration, the data or the model cannot be used.
    """
    prepared = prepare_sft(config)
    require_fit(site, prepared.model)
    folder = open_run_folder(
        config.trainer, prepared.source, model=prepared.model, key=site.model.key
    )
    with folder as start:
        return execute(lambda switch: _train(prepared, start, site=site, switch=switch))


def prepare_sft(config: SftConfig) -> PreparedSft:
    """Check and read everything but the model's weights."""
    require_loggers(config.trainer.logger)
    model = trained_model(config)
    folder, codec = open_trained_model(
        model, template_settings=config.data.apply_chat_template_kwargs
    )
    examples = load_sft_examples(config.data, codec)
    schedule = schedule_sft(config, len(examples))
    validates = bool(schedule.validation_steps)
    validation = load_sft_examples(config.data, codec, validation=True) if validates else []
    check_tokens(
        model, folder, token_ids=[example.token_ids for example in (*examples, *validation)]
    )
    source = open_source(examples, config.data, total_epochs=config.trainer.total_epochs)
    return PreparedSft(config, folder, codec, source, validation, schedule)


async def _train(
    prepared: PreparedSft, start: Start, *, site: RunSite, switch: StopSwitch
) -> RunSummary:
    config, checkpoint = prepared.config, start.checkpoint
    total_steps = prepared.schedule.total_training_steps
    async with start_trainer(site, config, total_steps=total_steps) as running:
        if checkpoint is not None:
            await running.runtime.call(running.engine.load, checkpoint.folder / "actor")
        parts = _assemble(prepared, start, site=site, running=running)
        try:
            loop = SupervisedLoop(parts)
            if checkpoint is not None:
                run_folder = config.trainer.run_folder
                await loop.restore(checkpoint, is_logged=is_logged(checkpoint, run_folder))
            switch.on_stop(loop.stop)
            with name_step(lambda: loop.step):
                return await loop.run()
        finally:
            for sink in parts.sinks:
                sink.close()


def _assemble(
    prepared: PreparedSft, start: Start, *, site: RunSite, running: RunningTrainer
) -> SupervisedContext:
    config = prepared.config
    sinks = open_run_sinks(config, start, total_steps=prepared.schedule.total_training_steps)
    return SupervisedContext(
        config=config,
        schedule=prepared.schedule,
        runtime=running.runtime,
        engine=running.engine,
        num_devices=site.num_devices,
        source=prepared.source,
        validation=draw_by_row(prepared.validation),
        store=start.store,
        codec=prepared.codec,
        sinks=sinks,
        preferred_tokens=site.platform.microbatch_tokens,
        clock=time.perf_counter,
    )
