# SPDX-License-Identifier: Apache-2.0
"""The folder of a run as a command finds it: whether it can be written, whether another run uses
it, whether the checkpoint in it fits, and how far its records go.

What cannot work is said before a model is loaded, and nothing of an existing run is touched until
its checkpoint is known to be whole.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tandem.checkpoint.lock import exclusive
from tandem.checkpoint.store import Checkpoint, CheckpointStore, find_checkpoint
from tandem.config.schema.trainer import TrainerConfig
from tandem.data.ledger import Source
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.errors import UserError
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, METRICS_FILE, last_step, read_records
from tandem.models.folder import ModelFolder, check_folder
from tandem.pipeline.validation import VALIDATION_SECONDS
from tandem.report.run_folder import CONFIG_FILE


@dataclass(frozen=True, slots=True)
class Start:
    """Where a run saves, and the checkpoint it goes on from, None for a new one."""

    store: CheckpointStore
    checkpoint: Checkpoint | None


@contextmanager
def open_run_folder(
    trainer: TrainerConfig, source: Source[Any], *, model: ModelFolder, key: str
) -> Iterator[Start]:
    """Keep the folder of a run to this process, and let ``source`` continue where it left off.

    Args:
        model: what is to be trained, and ``key`` the configuration key it came from.

    Raises:
        UserError: the folder cannot be written or another run uses it; or there is no such
            checkpoint, or it does not fit.
    """
    store = CheckpointStore(trainer.run_folder, trainer.max_actor_ckpt_to_keep)
    require_writable(store.folder)
    with exclusive(store.folder):
        checkpoint = find_checkpoint(trainer, store)
        if checkpoint is not None:
            require_fitting(checkpoint, source, model=model, key=key)
        yield Start(store, checkpoint)


def require_writable(folder: Path) -> None:
    """Make the folder of a run. Raises UserError if nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    if not os.access(folder, os.W_OK):
        raise _unwritable(folder, PermissionError("no permission, or a read-only disk"))


def write_config(folder: Path, config: BaseModel) -> None:
    """Write the resolved configuration into the folder of a run, whole or not at all.

    Raises:
        UserError: it cannot be written.
    """
    partial = folder / f".{CONFIG_FILE}.partial"
    try:
        partial.write_text(config.model_dump_json(indent=2))
        os.replace(partial, folder / CONFIG_FILE)
    except OSError as error:
        raise _unwritable(folder, error) from error


def require_fitting(
    checkpoint: Checkpoint, source: Source[Any], *, model: ModelFolder, key: str
) -> None:
    """Let ``source`` continue after ``checkpoint``.

    Args:
        model: what is to be trained, and ``key`` the configuration key it came from.

    Raises:
        UserError: the checkpoint is of another model or other data, or incomplete.
    """
    source.restore(checkpoint.read_state()["data"])
    folder = checkpoint.folder / "actor"
    is_sharded = (folder / SHARDED_FILE).is_file()
    saved = check_folder(str(folder), load_weight=not is_sharded, key="trainer.resume_from_path")
    same_family = saved.hf_config["model_type"] == model.hf_config["model_type"]
    if not same_family or saved.decoder_config != model.decoder_config:
        raise UserError(
            f"{key}={str(model.path)!r}: the checkpoint {checkpoint.folder} belongs to another "
            f"model. Set {key} to the one it was trained from, or trainer.resume_mode=disable."
        )


def last_step_to_keep(trainer: TrainerConfig, checkpoint: Checkpoint | None) -> int:
    """Up to which step the records in the run folder stay: all of them if nothing is trained, none
    for a new run, else those up to the checkpoint it goes on from."""
    if trainer.val_only:
        return last_step(trainer.run_folder / METRICS_FILE)
    return BEFORE_FIRST_STEP if checkpoint is None else checkpoint.step


def is_logged(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether the metrics of the checkpoint's step are on record, in this or another run folder.

    They are not if a run was killed between saving the checkpoint and logging its step.
    """
    is_own = checkpoint.folder.resolve().parent == folder.resolve()
    return not is_own or last_step(folder / METRICS_FILE) >= checkpoint.step


def is_validated(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether a validation of the checkpoint's step is on record, in this or another run folder.

    Where training goes on meanwhile, the step may have been logged without it by a run that failed.
    """
    is_own = checkpoint.folder.resolve().parent == folder.resolve()
    records = read_records(folder / METRICS_FILE) if is_own else []
    of_step = [record for record in records if record["step"] == checkpoint.step]
    return not is_own or any(VALIDATION_SECONDS in record for record in of_step)


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"trainer.default_local_dir={str(folder)!r}: cannot be written "
        f"({error.strerror or error}). Choose another folder, or free some space."
    )
