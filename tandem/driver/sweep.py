# SPDX-License-Identifier: Apache-2.0
"""``tandem sweep``: runs that train adapters over one base, and generate in joint passes.

Each run is the program of ``tandem train`` on a thread of its own, with its own data, rewards,
folder and optimizer. One that fails or ends leaves the joint passes, and the others go on. The
first signal stops all of them at their next step.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from tandem.api import EngineFailure, MetricSink
from tandem.config.derived.trained_model import trained_model
from tandem.driver import train
from tandem.driver.execution import Ended, StopSwitch, execute
from tandem.driver.launch import RunSite, local_site
from tandem.driver.run import Observer, PreparedRun, check_prepared, run_prepared
from tandem.driver.sweep_run import SweptRun
from tandem.errors import RunFailure, UserError
from tandem.metrics.console import LineSink
from tandem.pipeline.progress import RunSummary
from tandem.workers.shared_base import RunOverBase, SharedBase

logger = logging.getLogger(__name__)

_VALIDATION = "val-core/"


@dataclass(frozen=True, slots=True)
class _Ready:
    """A run whose input has been checked."""

    name: str
    site: RunSite
    prepared: PreparedRun
    over: RunOverBase
    switch: StopSwitch = field(default_factory=StopSwitch)

    def run(self) -> Ended[RunSummary]:
        """Train to the end on this thread."""
        steps = self.prepared.schedule.total_training_steps
        begin = f"%H:%M:%S {self.name.replace('%', '%%')} "
        lines: MetricSink = LineSink(
            sys.stdout, total_steps=steps, clock=lambda: time.strftime(begin).rstrip()
        )
        try:
            observer = Observer(sinks=(lines,), switch=self.switch)
            return run_prepared(self.site, self.prepared, observer=observer)
        finally:
            self.over.member.leave()


def run(runs: Sequence[SweptRun]) -> int:
    """Train all runs; return 0, or 128 plus the number of the signal that stopped them.

    Raises:
        UserError: a run cannot start; then none is started.
        RunFailure: a run has failed; the others have ended.
    """
    base = SharedBase(len(runs))
    ready = [_prepare(run, RunOverBase(base, index)) for index, run in enumerate(runs)]
    path = trained_model(runs[0].config).config.path
    logger.info("%d runs train adapters over one base, %s", len(ready), path)
    switch = StopSwitch()
    tasks: list[asyncio.Future[Ended[RunSummary]]] = []

    async def press_all() -> None:
        for one in ready:
            one.switch.press()

    async def program() -> None:
        loop = asyncio.get_running_loop()
        tasks.extend(loop.run_in_executor(threads, one.run) for one in ready)
        switch.on_stop(press_all)
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError:
            base.passes.abort("the sweep was interrupted")
            await press_all()
            raise

    with ThreadPoolExecutor(len(ready), thread_name_prefix="run") as threads:
        ended = execute(program, switch=switch)
    _report(ready, tasks)
    return ended.exit_code


def _prepare(run: SweptRun, over: RunOverBase) -> _Ready:
    """Check everything about a run. Raise UserError if it cannot start."""
    site = local_site(run.config)
    if site.platform.kernels != "torch":
        raise UserError(
            "trainer.device",
            run.config.trainer.device,
            rule=f"the engine for {site.platform.name} does not compute joint passes yet",
            remedy="Set trainer.device=cpu, or start each run by tandem train.",
        )
    prepared = train.prepare(run.config, over=over)
    decoder = prepared.model.decoder_config
    assert decoder is not None, "adapters are those of tandem's decoder"
    if decoder.vision is not None or decoder.experts is not None:
        kind = "that see" if decoder.vision is not None else "with experts"
        model = site.model
        raise UserError(
            model.key,
            str(prepared.model.path),
            rule=f"joint passes of models {kind} are not built",
            remedy="Start each run by tandem train.",
        )
    check_prepared(site, prepared)
    return _Ready(run.name, site, prepared, over)


def _report(ready: Sequence[_Ready], tasks: Sequence[asyncio.Future[Ended[RunSummary]]]) -> None:
    """Say how each run ended. Raise the first failure, as one line if it is the user's or a run's.

    Raises:
        RunFailure: some run has failed.
    """
    failed: list[str] = []
    for one, task in zip(ready, tasks, strict=True):
        error, steps = task.exception(), one.prepared.schedule.total_training_steps
        if error is not None:
            if not isinstance(error, UserError | RunFailure | EngineFailure):
                raise error
            failed.append(f"{one.name}: {error}")
            continue
        summary = task.result().result
        found = [
            f"{name.removeprefix(_VALIDATION)} {value:.4g}"
            for name, value in summary.validation.items()
            if name.startswith(_VALIDATION)
        ]
        state = f"step {summary.last_step} of {steps}"
        folder = one.site.config.trainer.run_folder
        logger.info("%s: %s", one.name, "; ".join([state, *found, f"records are in {folder}"]))
    if failed:
        others = f" ({len(failed)} of {len(ready)} runs failed)" if len(failed) > 1 else ""
        raise RunFailure(f"run {failed[0]}{others}")
