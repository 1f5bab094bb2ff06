# SPDX-License-Identifier: Apache-2.0
"""The course of a run, the same for ``tandem train`` and ``tandem sft``.

All of the user's input is checked before the model is loaded: loggers, data, model folders, and
last the run folder with its checkpoint. Nothing here computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.api import MetricSink, Runtime, WorkerGroup
from tandem.checkpoint.store import Checkpoint
from tandem.config.derived.schedule import Schedule
from tandem.data.ledger import Source
from tandem.data.tokenizer import TextCodec
from tandem.driver.ending import describe_end
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import RunSite, fitted, name_step, start_processes
from tandem.driver.restarts import Restarts
from tandem.driver.run_folder import Start, inspect_run_folder, open_run_folder
from tandem.models.folder import ModelFolder
from tandem.pipeline.progress import RunSummary

logger = logging.getLogger(__name__)


class Loop(Protocol):
    """A program that trains step by step."""

    @property
    def step(self) -> int: ...

    async def stop(self) -> None: ...

    async def run(self) -> RunSummary: ...


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """The checked input of a run, before the run folder is opened and the model loaded.

    Attributes:
        model: the model that is trained.
        auxiliary: the other models, by their names in a placement's layouts.
        open_loop: builds the engines and the loop of the command for the configuration of the
            launched run. The loop continues after the checkpoint of the run.
        described: what the plan of the run says beside its configuration: name -> text.
    """

    model: ModelFolder
    codec: TextCodec
    source: Source[Any]
    schedule: Schedule
    open_loop: Callable[[LaunchedRun], AbstractAsyncContextManager[Loop]]
    auxiliary: Mapping[str, ModelFolder] = field(default_factory=dict[str, ModelFolder])
    described: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class Observer:
    """The caller of a run, who sees its metrics, may stop it, and may start it again.

    Attributes:
        sinks: receivers of the metrics, besides those of ``trainer.logger``.
        switch: a switch that stops the run.
        restarts: the restarts by the caller; None without any.
    """

    sinks: Sequence[MetricSink] = ()
    switch: StopSwitch = field(default_factory=StopSwitch)
    restarts: Restarts[Any] | None = None

    def will_restart(self) -> bool:
        """Return whether the caller would start the run again after a failure at this moment."""
        asked_to_stop = self.switch.is_pressed
        return not asked_to_stop and self.restarts is not None and self.restarts.is_possible


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run whose folder is open and whose processes are running.

    Attributes:
        groups: the workers of each pool, by its name; None if this process does everything.
        sinks: receivers of the metrics, besides those of ``trainer.logger``.
    """

    prepared: PreparedRun
    start: Start
    site: RunSite
    runtime: Runtime
    groups: Mapping[str, WorkerGroup] | None
    sinks: Sequence[MetricSink]


@dataclass(frozen=True, slots=True)
class CheckedRun:
    """A run that can start here.

    Attributes:
        checkpoint: the checkpoint that it would resume; None for a new run.
    """

    site: RunSite
    prepared: PreparedRun
    checkpoint: Checkpoint | None


def check_prepared(site: RunSite, prepared: PreparedRun) -> CheckedRun:
    """Check what ``run_prepared`` checks before it loads a model; write and start nothing.

    Raises:
        UserError: the run folder, a model or the devices cannot be used.
    """
    site = fitted(site, prepared.model, auxiliary=prepared.auxiliary)
    checkpoint = inspect_run_folder(
        site.config,
        prepared.source,
        model=prepared.model,
        key=site.model.key,
        total_steps=prepared.schedule.total_training_steps,
    )
    return CheckedRun(site, prepared, checkpoint)


def run_to_end(site: RunSite, prepared: PreparedRun, *, observer: Observer) -> int:
    """Train as ``run_prepared`` does, say where the model is, and return the exit code."""
    ended = run_prepared(site, prepared, observer=observer)
    total_steps = prepared.schedule.total_training_steps
    for line in describe_end(site.config.trainer, ended.result, total_steps=total_steps):
        logger.info("%s", line)
    return ended.exit_code


def run_prepared(
    site: RunSite, prepared: PreparedRun, *, observer: Observer | None = None
) -> Ended[RunSummary]:
    """Train to the end, or until a signal or ``observer`` stops the run.

    Raises:
        UserError: the run folder, a model or the devices cannot be used.
        RunFailure, WorkerFailure: a process of the run failed, in a step or at startup.
    """
    site = fitted(site, prepared.model, auxiliary=prepared.auxiliary)
    folder = open_run_folder(
        site.config,
        prepared.source,
        model=prepared.model,
        key=site.model.key,
        total_steps=prepared.schedule.total_training_steps,
    )
    seen_by = observer or Observer()
    with folder as start:
        logger.info(
            "loading %s on %d device(s); records are in %s",
            prepared.model.path,
            site.num_devices,
            site.config.trainer.run_folder,
        )
        return execute(
            lambda: _train(prepared, start, site=site, observer=seen_by), switch=seen_by.switch
        )


async def _train(
    prepared: PreparedRun, start: Start, *, site: RunSite, observer: Observer
) -> RunSummary:
    running = start_processes(
        site,
        eos_ids=prepared.codec.eos_ids,
        total_steps=prepared.schedule.total_training_steps,
    )
    async with (
        running as (runtime, groups),
        prepared.open_loop(
            LaunchedRun(prepared, start, site, runtime, groups, observer.sinks)
        ) as loop,
    ):
        if observer.restarts is not None:
            observer.restarts.write_records()
        observer.switch.on_stop(loop.stop)
        with name_step(lambda: loop.step):
            return await loop.run()
