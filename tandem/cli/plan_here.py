# SPDX-License-Identifier: Apache-2.0
"""``tandem plan ARGUMENTS`` on the machine of the run: the plan after every check that a run makes.

Data, columns, tokenizer, chat template, model folders, reward function, loggers, devices and the
run folder are checked by the functions with which ``tandem train`` and ``tandem sft`` begin. What
they would refuse is refused with the same message.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tandem.cli.plan import PlanRequest, describe_memory_keys
from tandem.config.derived.sizes import ModelSizes
from tandem.config.plan.memory import plan_memory
from tandem.config.plan.plan import COUNTED_BEFORE_FILTER, UNCHECKED_DEVICE, UNREAD_MODEL, Plan
from tandem.driver.check import check_here
from tandem.driver.launch import RunSite
from tandem.driver.run import CheckedRun
from tandem.metrics.jsonl import METRICS_FILE
from tandem.platforms.select import choose_platform


def run(request: PlanRequest) -> int:
    """Check the run on this machine and print its plan; return the exit code.

    Raises:
        UserError: the command would refuse the run.
    """
    plan = request.plan
    return request.show(plan if plan.refusals else _checked(plan))


def _checked(plan: Plan) -> Plan:
    """Return the plan with what is known only after the checks: rows, agents, devices, resume."""
    with _collected_warnings() as warnings:
        checked = check_here(plan.config)
    site, prepared = checked.site, checked.prepared
    known = {
        name: ModelSizes.of(folder.hf_config)
        for name, folder in {"": prepared.model, **prepared.auxiliary}.items()
    }
    sizes, has_memory = known.pop(""), any(own.has_own_memory for own in site.platforms.values())
    auxiliary = {name: own for name, own in known.items() if own is not None}
    memory = None
    if sizes and has_memory:
        available = None if site.is_mixed else site.platform.total_memory_bytes()
        memory = plan_memory(site.config, sizes, auxiliary=auxiliary, available_bytes=available)
    answered = (COUNTED_BEFORE_FILTER, UNCHECKED_DEVICE, UNREAD_MODEL)
    told = (text for text in plan.warnings if not text.endswith(answered))
    return replace(
        plan,
        schedule=prepared.schedule,
        placement=site.placement,
        memory=memory,
        warnings=tuple(dict.fromkeys((*told, *warnings))),
        run={
            **plan.run,
            **prepared.described,
            "devices": _devices(site),
            **describe_memory_keys(site.chosen),
            "starts": _start(checked),
        },
    )


def _devices(site: RunSite) -> str:
    """Return the platforms of the run's devices, and how the one that trains was chosen."""
    trainer = site.config.trainer
    names = " and ".join(dict.fromkeys(own.name for own in site.platforms.values()))
    if site.is_mixed or trainer.device != "auto":
        return f"{site.num_devices} {names}"
    return f"{site.num_devices} {names} ({choose_platform(trainer.device, os.environ).reason})"


def _start(checked: CheckedRun) -> str:
    checkpoint, trainer = checked.checkpoint, checked.site.config.trainer
    if checkpoint is None:
        is_first = not (trainer.run_folder / METRICS_FILE).exists() or trainer.val_only
        return "at step 1, as a new run" + ("" if is_first else "; the earlier one is moved aside")
    total = checked.prepared.schedule.total_training_steps
    if checkpoint.step >= total and not trainer.val_only:
        return f"not at all: {checkpoint.folder} has all {total} steps"
    return f"after step {checkpoint.step}, from {checkpoint.folder}"


class _Collector(logging.Handler):
    """A handler that keeps the texts of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@contextmanager
def _collected_warnings() -> Iterator[list[str]]:
    """Collect the warnings of tandem while the block runs, instead of printing them."""
    collector, own = _Collector(), logging.getLogger("tandem")
    own.addHandler(collector)
    try:
        yield collector.texts
    finally:
        own.removeHandler(collector)
