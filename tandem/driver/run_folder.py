# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its lock, its checkpoint, its settings, and the records to keep.

Errors are raised before a model is loaded. Nothing of an existing run is changed until its
checkpoint is known to be complete, and nothing of it is ever overwritten (``set_aside``).
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tandem.api import MetricSink
from tandem.checkpoint.lock import exclusive, require_free
from tandem.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from tandem.config.check.continuation import Change, settings_json
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.data.ledger import Source
from tandem.driver.continuation import require_same_experiment
from tandem.driver.origins import Digests, origins_of, require_same_origins, write_origins
from tandem.driver.set_aside import set_aside, set_dumps_aside
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.errors import UserError
from tandem.metrics.activity import Activity
from tandem.metrics.jsonl import (
    BEFORE_FIRST_STEP,
    METRICS_FILE,
    JsonLinesFile,
    last_step,
    read_records,
)
from tandem.metrics.sinks import SinkSettings, open_sinks
from tandem.models.adapters import is_adapter_folder
from tandem.models.folder import ModelFolder, check_folder, require_same_adapters
from tandem.pipeline.validation import VALIDATION_SECONDS
from tandem.report.run_folder import CONFIG_FILE, SETTINGS_FILE
from tandem.rewards.log import REWARD_LOG_FILE

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Start:
    """The start of a run in its folder.

    Attributes:
        store: the checkpoints of the run.
        checkpoint: the checkpoint to resume; None for a new run.
        changes: the settings that differ from those that made the checkpoint.
        origins: the digests of what is read beside the checkpoint.
    """

    store: CheckpointStore
    checkpoint: Checkpoint | None
    changes: tuple[Change, ...] = ()
    origins: Digests = field(default_factory=dict[str, dict[str, str]])


@contextmanager
def open_run_folder(
    config: RunConfig | SftConfig,
    source: Source[Any],
    *,
    model: ModelFolder,
    key: str,
    total_steps: int,
) -> Iterator[Start]:
    """Lock the folder of a run, and restore ``source`` from its checkpoint.

    Args:
        model: the model to be trained.
        key: the configuration key of its path.
        total_steps: the number of training steps of the whole run.

    Raises:
        UserError: the folder cannot be written, another run uses it, or its checkpoint is missing
            or does not fit the model, the data or the settings.
    """
    trainer = config.trainer
    store = CheckpointStore(
        trainer.run_folder, trainer.max_actor_ckpt_to_keep, config=settings_json(config)
    )
    require_writable(store.folder)
    with exclusive(store.folder):
        store.repair()
        yield _start(config, source, store=store, model=model, key=key, total_steps=total_steps)


def inspect_run_folder(
    config: RunConfig | SftConfig,
    source: Source[Any],
    *,
    model: ModelFolder,
    key: str,
    total_steps: int,
) -> Checkpoint | None:
    """Return the checkpoint that a run would resume, None for a new run; leave nothing behind.

    Arguments and errors are those of ``open_run_folder``, and ``source`` is restored as there.
    """
    folder = config.trainer.run_folder
    _try_writing(folder)
    require_free(folder)
    store = CheckpointStore(folder)
    start = _start(config, source, store=store, model=model, key=key, total_steps=total_steps)
    return start.checkpoint


def _start(
    config: RunConfig | SftConfig,
    source: Source[Any],
    *,
    store: CheckpointStore,
    model: ModelFolder,
    key: str,
    total_steps: int,
) -> Start:
    checkpoint, origins = find_checkpoint(config.trainer, store), origins_of(config, model)
    if checkpoint is None:
        return Start(store, None, origins=origins)
    require_fitting(checkpoint, source, model=model, key=key)
    changes = require_same_experiment(config, checkpoint, total_steps=total_steps)
    is_wanted = config.trainer.resume_mode == "resume_path" or config.trainer.val_only
    require_same_origins(origins, checkpoint, is_wanted=is_wanted)
    return Start(store, checkpoint, changes, origins)


def require_writable(folder: Path) -> None:
    """Make the folder of a run. Raise UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder, os.W_OK):
        raise _no_right(folder)


def _try_writing(folder: Path) -> None:
    """Make the folder of a run as a start does, and remove the folders that were made."""
    absolute = folder.absolute()
    missing = [path for path in (absolute, *absolute.parents) if not os.path.exists(path)]
    try:
        require_writable(folder)
    finally:
        for path in missing:
            with suppress(OSError):  # it was not made, or another run has begun in it
                path.rmdir()


def begin_records(config: RunConfig | SftConfig, start: Start) -> None:
    """Set the records of earlier starts aside, and write the configuration into the run folder.

    The models are loaded before, and nothing is open in the folder yet.

    Raises:
        UserError: the folder cannot be written.
    """
    with name_unwritable(config.trainer.run_folder):
        _make_room(config.trainer, start)
        _write_config(config, start)
        if not config.trainer.val_only:
            write_origins(start.origins, config.trainer.run_folder)
        log = config.trainer.run_folder / REWARD_LOG_FILE
        if log.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(log))


@contextmanager
def name_unwritable(folder: Path) -> Iterator[None]:
    """Raise a failure to write into the folder of a run as UserError."""
    try:
        yield
    except OSError as error:
        raise _unwritable(folder, error) from error


def open_run_sinks(
    trainer: TrainerConfig, start: Start, *, total_steps: int, activity: Activity
) -> Sequence[MetricSink]:
    """Open the sinks of a run's metrics. Raise UserError if one of them cannot start."""
    settings = SinkSettings(
        trainer=trainer,
        run_folder=trainer.run_folder,
        total_steps=total_steps,
        keep_through_step=last_step_to_keep(trainer, start.checkpoint),
        environment=os.environ,
        stream=sys.stdout,
        activity=activity,
    )
    return open_sinks(settings)


def _make_room(trainer: TrainerConfig, start: Start) -> None:
    """Move what this run would overwrite or contradict, and say where to."""
    checkpoint, now = start.checkpoint, datetime.now()
    if trainer.val_only:
        step = 0 if checkpoint is None else checkpoint.step
        moved, folders = f"the dump of step {step}", set_dumps_aside(trainer, of_step=step, now=now)
    elif checkpoint is not None and _is_own(checkpoint, trainer.run_folder):
        step = checkpoint.step
        moved = f"all that was recorded after step {step}"
        folders = set_aside(trainer, start.store, after_step=step, now=now)
    else:
        moved = "the earlier run"
        folders = set_aside(trainer, start.store, after_step=BEFORE_FIRST_STEP, now=now)
    if folders:
        logger.warning("moved %s to %s", moved, ", ".join(map(str, folders)))


def _write_config(config: RunConfig | SftConfig, start: Start) -> None:
    folder = config.trainer.run_folder
    if config.trainer.val_only and (folder / CONFIG_FILE).exists():
        return  # it tells which settings made the training steps
    # Renamed when complete, so a reader never finds half of it.
    partial = folder / f".{CONFIG_FILE}.partial"
    partial.write_text(config.model_dump_json(indent=2), encoding="utf-8")
    os.replace(partial, folder / CONFIG_FILE)
    if start.checkpoint is None or not start.changes or config.trainer.val_only:
        return
    step = start.checkpoint.step
    file = JsonLinesFile(folder / SETTINGS_FILE, keep_through_step=step)
    changed = {change.key: [change.before, change.after] for change in start.changes}
    file.append({"step": step + 1, "changed": changed})
    file.close()


def require_fitting(
    checkpoint: Checkpoint, source: Source[Any], *, model: ModelFolder, key: str
) -> None:
    """Restore ``source`` from a checkpoint, after checking that the checkpoint is of ``model``.

    Args:
        model: the model to be trained.
        key: the configuration key of its path.

    Raises:
        UserError: the checkpoint belongs to another model or other data, or is incomplete.
    """
    source.restore(checkpoint.read_state().get("data", {}))
    folder = checkpoint.folder / "actor"
    if is_adapter_folder(folder) or model.start is not None:
        require_same_adapters(folder, model, key=key)
        return
    is_sharded = (folder / SHARDED_FILE).is_file()
    saved = check_folder(str(folder), load_weight=not is_sharded, key="trainer.resume_from_path")
    same_family = saved.hf_config["model_type"] == model.hf_config["model_type"]
    if not same_family or saved.decoder_config != model.decoder_config:
        raise UserError(
            key,
            str(model.path),
            rule=f"the checkpoint {checkpoint.folder} belongs to another model",
            remedy=f"Set {key} to the model it was trained from, or trainer.resume_mode=disable.",
        )


def last_step_to_keep(trainer: TrainerConfig, checkpoint: Checkpoint | None) -> int:
    """Return the last step whose records in the run folder are kept.

    A run that only validates keeps all records, a new run keeps none, and a resumed run keeps those
    up to its checkpoint.
    """
    if trainer.val_only:
        return last_step(trainer.run_folder / METRICS_FILE)
    return BEFORE_FIRST_STEP if checkpoint is None else checkpoint.step


def is_logged(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether the metrics of the checkpoint's step were logged, here or in another folder.

    A run that is killed between saving and logging leaves a checkpoint without metrics.
    """
    return not _is_own(checkpoint, folder) or last_step(folder / METRICS_FILE) >= checkpoint.step


def is_validated(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether the checkpoint's step was validated, here or in another folder.

    If training overlaps validation, a failed run may have logged the step alone.
    """
    is_own = _is_own(checkpoint, folder)
    records = read_records(folder / METRICS_FILE) if is_own else []
    of_step = [record for record in records if record.get("step") == checkpoint.step]
    return not is_own or any(VALIDATION_SECONDS in record for record in of_step)


def _no_right(folder: Path) -> UserError:
    return _unwritable(folder, PermissionError("no permission, or a read-only disk"))


def _is_own(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether a checkpoint is one of the run in ``folder``."""
    return checkpoint.folder.resolve().parent == folder.resolve()


def _unwritable(folder: Path, error: OSError) -> UserError:
    at = f" at {error.filename}" if error.filename not in (None, str(folder)) else ""
    return UserError(
        "trainer.default_local_dir",
        str(folder),
        rule=f"cannot be written ({error.strerror or error}{at})",
        remedy="Choose another folder, or free some space.",
    )
