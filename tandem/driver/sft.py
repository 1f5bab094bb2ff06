# SPDX-License-Identifier: Apache-2.0
"""Composition root of ``tandem sft``: from a config to a finished fine-tuning run."""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass

from tandem.config.derived.schedule import Schedule, schedule_sft
from tandem.config.schema.sft import SftConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.sft import SftExample, SftSource, load_sft_examples
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import (
    HostedTrainer,
    Site,
    hosted_trainer,
    naming_step,
    on_site,
    require_fit,
)
from tandem.driver.model_checks import position_caution, require_known_tokens
from tandem.driver.run_folder import (
    Start,
    is_logged,
    last_step_to_keep,
    open_run_folder,
    write_config,
)
from tandem.metrics.sinks import open_sinks, require_loggers
from tandem.models.folder import ModelFolder, check_folder
from tandem.pipeline.loop import RunSummary
from tandem.pipeline.supervised import SupervisedLoop, SupervisedParts

logger = logging.getLogger(__name__)

MODEL_KEY = "model.path"


@dataclass(frozen=True, slots=True)
class PreparedSft:
    """What is known and checked before the run folder is touched and the model is loaded."""

    config: SftConfig
    model: ModelFolder
    codec: TextCodec
    source: SftSource
    validation: list[SftExample]
    schedule: Schedule


def run(config: SftConfig) -> int:
    """Fine-tune; the exit code is 0, or 128 plus the signal that stopped the run."""
    return on_site(config, lambda site: run_supervised(config, site).exit_code)


def run_supervised(config: SftConfig, site: Site) -> Ended[RunSummary]:
    """Fine-tune as ``config`` says.

    Raises:
        UserError: something in the config, the data or the model cannot work.
    """
    prepared = prepare_sft(config)
    require_fit(site, prepared.model, key=MODEL_KEY)
    folder = open_run_folder(config.trainer, prepared.source, model=prepared.model, key=MODEL_KEY)
    with folder as start:
        return execute(lambda switch: _train(prepared, start, site=site, switch=switch))


def prepare_sft(config: SftConfig) -> PreparedSft:
    """Check and read everything but the model's weights."""
    require_loggers(config.trainer.logger)
    model = check_folder(
        config.model.path, trust_remote_code=config.model.trust_remote_code, key=MODEL_KEY
    )
    codec = load_codec(
        config.model.path,
        template_settings=config.data.apply_chat_template_kwargs,
        chat_template=config.chat_template,
        trust_remote_code=config.model.trust_remote_code,
        key=MODEL_KEY,
    )
    examples = load_sft_examples(config.data, codec)
    schedule = schedule_sft(config, len(examples))
    validates = bool(schedule.validation_steps)
    validation = load_sft_examples(config.data, codec, validation=True) if validates else []
    require_known_tokens(
        (example.token_ids for example in (*examples, *validation)),
        model.hf_config,
        path=config.model.path,
        key=MODEL_KEY,
    )
    for warning in position_caution(
        model.hf_config,
        config.data.max_length,
        keys="data.max_length",
        model=f"{MODEL_KEY}={config.model.path!r}",
    ):
        logger.warning("%s", warning)
    source = open_source(examples, config.data, total_epochs=config.trainer.total_epochs)
    return PreparedSft(config, model, codec, source, validation, schedule)


async def _train(
    prepared: PreparedSft, start: Start, *, site: Site, switch: StopSwitch
) -> RunSummary:
    config, checkpoint = prepared.config, start.checkpoint
    total_steps = prepared.schedule.total_training_steps
    async with hosted_trainer(site, config, total_steps=total_steps) as hosted:
        if checkpoint is not None:
            await hosted.runtime.call(hosted.engine.load, checkpoint.folder / "actor")
        parts = _assemble(prepared, start, site=site, hosted=hosted)
        try:
            loop = SupervisedLoop(parts)
            if checkpoint is not None:
                run_folder = config.trainer.run_folder
                await loop.restore(checkpoint, is_logged=is_logged(checkpoint, run_folder))
            switch.on_stop(loop.stop)
            with naming_step(lambda: loop.step):
                return await loop.run()
        finally:
            for sink in parts.sinks:
                sink.close()


def _assemble(
    prepared: PreparedSft, start: Start, *, site: Site, hosted: HostedTrainer
) -> SupervisedParts:
    config = prepared.config
    write_config(config.trainer.run_folder, config)
    sinks = open_sinks(
        config.trainer,
        config.trainer.run_folder,
        total_steps=prepared.schedule.total_training_steps,
        keep_through_step=last_step_to_keep(config.trainer, start.checkpoint),
        environment=os.environ,
        stream=sys.stdout,
    )
    return SupervisedParts(
        config=config,
        schedule=prepared.schedule,
        runtime=hosted.runtime,
        engine=hosted.engine,
        num_devices=site.num_devices,
        source=prepared.source,
        validation=draw_by_row(prepared.validation),
        store=start.store,
        codec=prepared.codec,
        sinks=sinks,
        preferred_tokens=site.platform.microbatch_tokens,
        clock=time.perf_counter,
    )
