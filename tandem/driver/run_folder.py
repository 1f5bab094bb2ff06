# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: its lock, its checkpoint, and the records to keep.

Errors are raised before a model is loaded. Nothing of an existing run is changed until its
checkpoint is known to be complete.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.api import MetricSink
from tandem.checkpoint.lock import exclusive
from tandem.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.trainer import TrainerConfig
from tandem.data.ledger import Source
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.errors import UserError
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, METRICS_FILE, last_step, read_records
from tandem.metrics.sinks import open_sinks
from tandem.models.folder import ModelFolder, check_folder
from tandem.pipeline.validation import VALIDATION_SECONDS
from tandem.report.run_folder import CONFIG_FILE


@dataclass(frozen=True, slots=True)
class Start:
    """The store of a run's checkpoints, and the checkpoint to resume; None for a new run."""

    store: CheckpointStore
    checkpoint: Checkpoint | None


@contextmanager
def open_run_folder(
    trainer: TrainerConfig, source: Source[Any], *, model: ModelFolder, key: str
) -> Iterator[Start]:
    """Lock the folder of a run, and restore ``source`` from its checkpoint.

    Args:
        model: the model to be trained.
        key: the configuration key of its path.

    Raises:
        UserError: the folder cannot be written, another run uses it, or its checkpoint is missing
            or does not fit.
    """
    store = CheckpointStore(trainer.run_folder, trainer.max_actor_ckpt_to_keep)
    require_writable(store.folder)
    with exclusive(store.folder):
        checkpoint = find_checkpoint(trainer, store)
        if checkpoint is not None:
            require_fitting(checkpoint, source, model=model, key=key)
        yield Start(store, checkpoint)


def require_writable(folder: Path) -> None:
    """Make the folder of a run. Raise UserError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder, os.W_OK):
        raise _unwritable(folder, PermissionError("no permission, or a read-only disk"))


def open_run_sinks(
    config: RunConfig | SftConfig, start: Start, *, total_steps: int
) -> Sequence[MetricSink]:
    """Write the resolved configuration into the run folder, and open the sinks of its metrics.

    Raises:
        UserError: the folder cannot be written.
    """
    trainer = config.trainer
    _write_config(trainer.run_folder, config)
    return open_sinks(
        trainer,
        trainer.run_folder,
        total_steps=total_steps,
        keep_through_step=last_step_to_keep(trainer, start.checkpoint),
        environment=os.environ,
        stream=sys.stdout,
    )


def _write_config(folder: Path, config: RunConfig | SftConfig) -> None:
    # Renamed when complete, so a reader never finds half of it.
    partial = folder / f".{CONFIG_FILE}.partial"
    try:
        partial.write_text(config.model_dump_json(indent=2))
        os.replace(partial, folder / CONFIG_FILE)
    except OSError as error:
        raise _unwritable(folder, error) from error


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
    source.restore(checkpoint.read_state()["data"])
    folder = checkpoint.folder / "actor"
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
    is_own = checkpoint.folder.resolve().parent == folder.resolve()
    return not is_own or last_step(folder / METRICS_FILE) >= checkpoint.step


def is_validated(checkpoint: Checkpoint, folder: Path) -> bool:
    """Return whether the checkpoint's step was validated, here or in another folder.

    If training overlaps validation, a failed run may have logged the step alone.
    """
    is_own = checkpoint.folder.resolve().parent == folder.resolve()
    records = read_records(folder / METRICS_FILE) if is_own else []
    of_step = [record for record in records if record["step"] == checkpoint.step]
    return not is_own or any(VALIDATION_SECONDS in record for record in of_step)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        "trainer.default_local_dir",
        str(folder),
        rule=f"cannot be written ({error.strerror or error})",
        remedy="Choose another folder, or free some space.",
    )
