# SPDX-License-Identifier: Apache-2.0
"""Composition root of ``tandem sft``: from a config to a finished fine-tuning run."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from tandem.checkpoint.resume import find_checkpoint
from tandem.checkpoint.store import Checkpoint, CheckpointStore
from tandem.cli.execution import Ended, StopSwitch, execute
from tandem.config.schedule import Schedule, schedule_sft
from tandem.config.sft import SftConfig
from tandem.data.sft import SftExample, load_sft_examples, open_sft_source, validation_sequences
from tandem.data.tokenizer import TextCodec, load_codec
from tandem.metrics.sinks import open_sinks, require_loggers
from tandem.models.folder import check_folder
from tandem.pipeline.loop import RunSummary
from tandem.pipeline.supervised import SupervisedLoop, SupervisedParts
from tandem.platforms.select import select_platform
from tandem.runtime.inprocess import InProcessRuntime
from tandem.workers.colocated import build_trainer


@dataclass(frozen=True, slots=True)
class PreparedSft:
    """What is known and checked before the model is loaded."""

    config: SftConfig
    codec: TextCodec
    examples: list[SftExample]
    validation: list[SftExample]
    schedule: Schedule
    store: CheckpointStore
    checkpoint: Checkpoint | None


def run_supervised(config: SftConfig) -> Ended[RunSummary]:
    """Fine-tune as ``config`` says.

    Raises:
        UserError: something in the config, the data or the model cannot work.
    """
    prepared = prepare_sft(config)
    return execute(lambda switch: _train(prepared, switch))


def prepare_sft(config: SftConfig) -> PreparedSft:
    """Check and read everything but the model's weights."""
    require_loggers(config.trainer.logger)
    check_folder(config.model.path, trust_remote_code=config.model.trust_remote_code)
    codec = load_codec(
        config.model.path,
        template_settings=config.data.apply_chat_template_kwargs,
        trust_remote_code=config.model.trust_remote_code,
        key="model.partial_pretrain",
    )
    examples = load_sft_examples(config.data, codec)
    schedule = schedule_sft(config, len(examples))
    validates = bool(schedule.validation_steps)
    store = CheckpointStore(config.trainer.run_folder, config.trainer.max_actor_ckpt_to_keep)
    return PreparedSft(
        config=config,
        codec=codec,
        examples=examples,
        validation=load_sft_examples(config.data, codec, validation=True) if validates else [],
        schedule=schedule,
        store=store,
        checkpoint=find_checkpoint(config.trainer, store),
    )


async def _train(prepared: PreparedSft, switch: StopSwitch) -> RunSummary:
    config = prepared.config
    platform = select_platform(config.trainer.device)
    runtime = InProcessRuntime(platform.prepare_thread)
    checkpoint = prepared.checkpoint
    try:
        engine = await runtime.call(
            build_trainer,
            config,
            platform=platform,
            total_steps=prepared.schedule.total_training_steps,
        )
        sinks = open_sinks(
            config.trainer,
            config.trainer.run_folder,
            total_steps=prepared.schedule.total_training_steps,
            resume_step=None if checkpoint is None else checkpoint.step,
            environment=os.environ,
            stream=sys.stdout,
        )
        (config.trainer.run_folder / "config.json").write_text(config.model_dump_json(indent=2))
        try:
            loop = SupervisedLoop(
                SupervisedParts(
                    config=config,
                    schedule=prepared.schedule,
                    runtime=runtime,
                    engine=engine,
                    source=open_sft_source(
                        prepared.examples, config.data, total_epochs=config.trainer.total_epochs
                    ),
                    validation=validation_sequences(prepared.validation),
                    store=prepared.store,
                    sinks=sinks,
                    clock=time.perf_counter,
                )
            )
            if checkpoint is not None:
                await loop.restore(checkpoint)
            switch.on_stop(loop.stop)
            return await loop.run()
        finally:
            for sink in sinks:
                sink.close()
    finally:
        await runtime.close()
