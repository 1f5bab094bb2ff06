# SPDX-License-Identifier: Apache-2.0
"""The records of earlier starts in a run folder, which a start never overwrites.

A start that continues nothing moves all of them to ``before-<date-time>/``, which is then a run
folder of its own. A start that continues after a step moves the later records, checkpoints and
dumps. ``placement.json`` and the lock describe running processes and are replaced by each start.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from tandem.checkpoint.store import CONFIG_NAME, CheckpointStore
from tandem.config.schema.trainer import TrainerConfig
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, METRICS_FILE, truncate_after
from tandem.metrics.records import ROLLOUTS_FILE
from tandem.metrics.sinks import EVENTS_FOLDER
from tandem.metrics.trace import TRACE_FILE
from tandem.report.run_folder import (
    EXPORT_FOLDER,
    ORIGINS_FILE,
    REPORT_FILE,
    RESTARTS_FILE,
    SETTINGS_FILE,
    SUMMARY_FILE,
)
from tandem.rewards.log import REWARD_LOG_FILE

_RECORDS = (METRICS_FILE, ROLLOUTS_FILE, SETTINGS_FILE)
_OTHERS = (
    TRACE_FILE,
    CONFIG_NAME,
    SUMMARY_FILE,
    ORIGINS_FILE,
    REPORT_FILE,
    RESTARTS_FILE,
    REWARD_LOG_FILE,
    EVENTS_FOLDER,
)
_DUMP = re.compile(r"(\d+)\.jsonl")
_EXPORT = re.compile(EXPORT_FOLDER.format(step=r"(\d+)"))


def set_aside(
    trainer: TrainerConfig, store: CheckpointStore, *, after_step: int, now: datetime
) -> list[Path]:
    """Move what earlier starts left after a step; return the folders that it was moved to.

    Args:
        after_step: the step that the run continues after; ``BEFORE_FIRST_STEP`` if it continues
            nothing of its folder.
    """
    name = _unused_name(trainer, now)
    aside = trainer.run_folder / name
    store.set_aside(aside, after_step=after_step)
    for folder in sorted(trainer.run_folder.iterdir()):
        match = _EXPORT.fullmatch(folder.name)
        if match is not None and int(match[1]) > after_step:
            _move(folder, aside)
    if after_step == BEFORE_FIRST_STEP:
        for file in (*_RECORDS, *_OTHERS):
            _move(trainer.run_folder / file, aside)
    else:
        _set_later_records_aside(trainer.run_folder, aside, after_step=after_step)
    dumps = _move_dumps(trainer, name, is_moved=lambda step: step > after_step)
    return list(dict.fromkeys(folder for folder in (aside, *dumps) if folder.exists()))


def set_dumps_aside(trainer: TrainerConfig, *, of_step: int, now: datetime) -> list[Path]:
    """Move the dump of a step that is validated again; return the folder it was moved to."""
    return _move_dumps(trainer, _unused_name(trainer, now), is_moved=lambda step: step == of_step)


def _set_later_records_aside(folder: Path, aside: Path, *, after_step: int) -> None:
    for file in (METRICS_FILE, ROLLOUTS_FILE):
        truncate_after(folder / file, after_step, aside=aside / file)
    # A start with other settings may have ended before its first step.
    truncate_after(folder / SETTINGS_FILE, after_step, aside=aside / SETTINGS_FILE)
    if aside.exists() and (folder / CONFIG_NAME).exists():
        shutil.copy2(folder / CONFIG_NAME, aside)


def _move_dumps(
    trainer: TrainerConfig, name: str, *, is_moved: Callable[[int], bool]
) -> list[Path]:
    moved: list[Path] = []
    for folder in _dump_folders(trainer):
        for path in sorted(folder.glob("*.jsonl")):
            match = _DUMP.fullmatch(path.name)
            if match is not None and is_moved(int(match[1])):
                _move(path, folder / name)
                moved.append(folder / name)
    return list(dict.fromkeys(moved))


def _dump_folders(trainer: TrainerConfig) -> Iterator[Path]:
    if trainer.rollout_data_dir is not None:
        yield trainer.rollout_data_folder
    if trainer.validation_data_dir is not None:
        yield trainer.validation_data_folder


def _unused_name(trainer: TrainerConfig, now: datetime) -> str:
    first = f"before-{now:%Y-%m-%d-%H%M%S}"
    folders = (trainer.run_folder, *_dump_folders(trainer))
    names = (first if number == 1 else f"{first}-{number}" for number in range(1, 1 << 30))
    return next(name for name in names if not any((folder / name).exists() for folder in folders))


def _move(path: Path, folder: Path) -> None:
    if path.exists():
        folder.mkdir(exist_ok=True)
        os.rename(path, folder / path.name)
