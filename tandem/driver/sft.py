# SPDX-License-Identifier: Apache-2.0
"""``tandem sft``: its checked input, its engine and the loop that runs it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from tandem.config.derived.schedule import schedule_run
from tandem.config.derived.trained_model import trained_model
from tandem.config.schema.sft import SftConfig
from tandem.data.ledger import draw_by_row, open_source
from tandem.data.sft import SftExample, load_sft_examples
from tandem.driver.auxiliary_models import check_tokens, open_trained_model
from tandem.driver.launch import run_on_site
from tandem.driver.pictures import picture_rule
from tandem.driver.run import LaunchedRun, Observer, PreparedRun, run_to_end
from tandem.driver.run_folder import begin_records, is_logged, open_run_sinks
from tandem.metrics.activity import Activity
from tandem.metrics.sinks import require_loggers
from tandem.pipeline.supervised import SupervisedContext, SupervisedLoop
from tandem.workers.colocated import build_trainer
from tandem.workers.deployment import remote_trainer


def run(config: SftConfig, *, observer: Observer | None = None) -> int:
    """Train the model; return 0, or 128 plus the number of the signal that stopped the run."""
    seen_by = observer or Observer()
    return run_on_site(
        config,
        lambda site: run_to_end(site, prepare(config), observer=seen_by),
        will_restart=seen_by.will_restart,
    )


def prepare(config: SftConfig, *, fetches_weights: bool = True) -> PreparedRun:
    """Check and read everything but the model's weights.

    Args:
        fetches_weights: whether weights that are only on the hub are downloaded.

    Raises:
        UserError: the configuration, the data or the model cannot be used.
    """
    require_loggers(config.trainer.logger)
    model = trained_model(config)
    folder, codec = open_trained_model(
        model,
        template_settings=config.data.apply_chat_template_kwargs,
        fetches_weights=fetches_weights,
    )
    pictures = picture_rule(config, folder, codec=codec)
    load = partial(load_sft_examples, config.data, codec, pictures=pictures)
    examples = load()
    schedule = schedule_run(config, len(examples))
    validates = bool(schedule.validation_steps)
    validation = load(validation=True) if validates else []
    check_tokens(
        model, folder, token_ids=[example.text_ids for example in (*examples, *validation)]
    )
    source = open_source(examples, config.data, total_epochs=config.trainer.total_epochs)
    open_loop = partial(_open_loop, validation=validation)
    return PreparedRun(folder, codec, source, schedule, open_loop)


@asynccontextmanager
async def _open_loop(
    run: LaunchedRun, *, validation: Sequence[SftExample]
) -> AsyncIterator[SupervisedLoop]:
    config, placement = run.site.config, run.site.placement
    assert isinstance(config, SftConfig), "the site is that of this command"
    checkpoint, prepared = run.start.checkpoint, run.prepared
    total_steps = prepared.schedule.total_training_steps
    engine = (
        await run.runtime.call(
            build_trainer, config, placement, platform=run.site.platform, total_steps=total_steps
        )
        if run.groups is None
        else remote_trainer(run.groups, placement)
    )
    if checkpoint is not None:
        await run.runtime.call(engine.load, checkpoint.folder / "actor")
    begin_records(config, run.start)
    activity = Activity()
    sinks = open_run_sinks(config.trainer, run.start, total_steps=total_steps, activity=activity)
    sinks = (*sinks, *run.sinks)
    context = SupervisedContext(
        config=config,
        schedule=prepared.schedule,
        runtime=run.runtime,
        engine=engine,
        num_devices=run.site.num_devices,
        source=prepared.source,
        validation=partial(draw_by_row, validation),
        store=run.start.store,
        codec=prepared.codec,
        sinks=sinks,
        preferred_tokens=run.site.platform.microbatch_tokens,
        clock=time.perf_counter,
        activity=activity,
    )
    try:
        loop = SupervisedLoop(context)
        if checkpoint is not None:
            logged = is_logged(checkpoint, config.trainer.run_folder)
            await loop.restore(checkpoint, is_logged=logged)
        yield loop
    finally:
        for sink in sinks:
            sink.close()
