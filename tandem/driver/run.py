# SPDX-License-Identifier: Apache-2.0
"""The course of a run, the same for ``tandem train`` and ``tandem sft``.

All of the user's input is checked before the model is loaded: loggers, data, model folders, and
last the run folder with its checkpoint. Nothing here computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from tandem.api import Runtime, WorkerGroup
from tandem.config.derived.schedule import Schedule
from tandem.data.ledger import Source
from tandem.data.tokenizer import TextCodec
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import RunSite, name_step, require_fit, start_processes
from tandem.driver.run_folder import Start, open_run_folder
from tandem.models.folder import ModelFolder
from tandem.pipeline.progress import RunSummary


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
        open_loop: builds the engines and the loop of the command, which continues after the
            checkpoint of the run, and closes them in the end.
    """

    model: ModelFolder
    codec: TextCodec
    source: Source[Any]
    schedule: Schedule
    open_loop: Callable[[LaunchedRun], AbstractAsyncContextManager[Loop]]
    auxiliary: Mapping[str, ModelFolder] = field(default_factory=dict[str, ModelFolder])


@dataclass(frozen=True, slots=True)
class LaunchedRun:
    """A run whose folder is open and whose processes are running.

    Attributes:
        groups: the workers of each pool, by its name; None if this process does everything.
    """

    prepared: PreparedRun
    start: Start
    site: RunSite
    runtime: Runtime
    groups: Mapping[str, WorkerGroup] | None


def run_prepared(site: RunSite, prepared: PreparedRun) -> Ended[RunSummary]:
    """Train to the end, or until a signal.

    Raises:
        UserError: the run folder, a model or the devices cannot be used.
        RunFailure, WorkerFailure: a process of the run failed, in a step or at startup.
    """
    require_fit(site, prepared.model, auxiliary=prepared.auxiliary)
    folder = open_run_folder(
        site.config.trainer, prepared.source, model=prepared.model, key=site.model.key
    )
    with folder as start:
        return execute(lambda switch: _train(prepared, start, site=site, switch=switch))


async def _train(
    prepared: PreparedRun, start: Start, *, site: RunSite, switch: StopSwitch
) -> RunSummary:
    running = start_processes(
        site,
        eos_ids=prepared.codec.eos_ids,
        total_steps=prepared.schedule.total_training_steps,
    )
    async with (
        running as (runtime, groups),
        prepared.open_loop(LaunchedRun(prepared, start, site, runtime, groups)) as loop,
    ):
        switch.on_stop(loop.stop)
        with name_step(lambda: loop.step):
            return await loop.run()
