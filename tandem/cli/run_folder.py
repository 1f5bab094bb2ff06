# SPDX-License-Identifier: Apache-2.0
"""The folder of a run as a command finds it: whether it can be written, whether the checkpoint in
it fits, and how far its records go.

What cannot work is said before a model is loaded, and nothing of an existing run is touched until
its checkpoint is known to be whole.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tandem.checkpoint.store import Checkpoint
from tandem.data.source import Source
from tandem.errors import UserError
from tandem.metrics.jsonl import last_step
from tandem.metrics.jsonl_sink import METRICS_FILE
from tandem.metrics.run_folder import CONFIG_FILE
from tandem.models.folder import ModelFolder, check_folder


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
    saved = check_folder(str(folder), key="trainer.resume_from_path")
    same_family = saved.hf_config["model_type"] == model.hf_config["model_type"]
    if not same_family or saved.decoder_config != model.decoder_config:
        raise UserError(
            f"{key}={str(model.path)!r}: the checkpoint {checkpoint.folder} belongs to another "
            f"model. Set {key} to the one it was trained from, or trainer.resume_mode=disable."
        )


def is_logged(checkpoint: Checkpoint, folder: Path) -> bool:
    """Whether the metrics of the checkpoint's step are on record, in this or another run folder.

    They are not if a run was killed between saving the checkpoint and logging its step.
    """
    is_own = checkpoint.folder.resolve().parent == folder.resolve()
    return not is_own or last_step(folder / METRICS_FILE) >= checkpoint.step


def _unwritable(folder: Path, error: OSError) -> UserError:
    return UserError(
        f"trainer.default_local_dir={str(folder)!r}: cannot be written "
        f"({error.strerror or error}). Choose another folder, or free some space."
    )
