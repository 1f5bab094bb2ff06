# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run: ``global_step_N`` folders and the tracker file naming the latest, as verl
lays them out.

A checkpoint is written beside its final name, flushed to disk, and renamed; the tracker is replaced
after that. So a crash or a full disk at any moment leaves the previous checkpoint and the tracker
whole. What is inside the folder is the engines' business, except ``pipeline.json``.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tandem.errors import UserError

logger = logging.getLogger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
STATE_NAME = "pipeline.json"
_PARTIAL = ".partial_step_"
_REPLACED = ".replaced_step_"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int

    def read_state(self) -> dict[str, Any]:
        """The pipeline's state. Raises UserError if the file is missing or damaged."""
        path = self.folder / STATE_NAME
        try:
            return json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(
                f"trainer.resume_from_path={str(self.folder)!r}: {STATE_NAME} cannot be read "
                f"({error}). Name a folder global_step_N that tandem wrote, or set "
                "trainer.resume_mode=disable."
            ) from error


class CheckpointStore:
    """All checkpoints of one run folder, newest kept longest.

    Args:
        folder: ``trainer.default_local_dir``.
        max_to_keep: how many to keep, None for all.
    """

    def __init__(self, folder: Path, max_to_keep: int | None = None) -> None:
        self.folder = folder
        self._max_to_keep = max_to_keep

    def latest(self) -> Checkpoint | None:
        """What the tracker names, None if the run has no checkpoint yet."""
        try:
            step = int((self.folder / TRACKER_NAME).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except ValueError as error:
            raise UserError(
                f"trainer.resume_mode='auto': {self.folder / TRACKER_NAME} holds no step number. "
                "Write the step into it, or set trainer.resume_mode=disable."
            ) from error
        checkpoint = _find(self.folder / f"global_step_{step}")
        if checkpoint is None:
            raise UserError(
                f"trainer.resume_mode='auto': {self.folder / TRACKER_NAME} names step {step}, of "
                "which there is no checkpoint. Write the step of another one into it, or set "
                "trainer.resume_mode=disable."
            )
        return checkpoint

    def mend(self) -> None:
        """Clear away what a killed save has left behind; only the run that saves here may do so.

        If it was killed while it replaced an older checkpoint of the same step, that one returns.
        """
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            target = self.folder / replaced.name.replace(_REPLACED, "global_step_")
            if not target.exists():
                replaced.rename(target)
        for pattern in (f"{_REPLACED}*", f"{_PARTIAL}*"):
            for folder in self.folder.glob(pattern):
                shutil.rmtree(folder)

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Yield a fresh folder to fill; on leaving it becomes ``global_step_{step}`` and the latest
        one.

        Raises:
            UserError: the folder could not be written (a full disk, say); nothing older was
            touched.
        """
        target = self.folder / f"global_step_{step}"
        partial = self.folder / f"{_PARTIAL}{step}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            (partial / STATE_NAME).write_text(json.dumps(state))
            _flush_tree(partial)
            replaced = self.folder / f"{_REPLACED}{step}"
            if target.exists():
                target.rename(replaced)
            partial.rename(target)
            _replace_text(self.folder / TRACKER_NAME, str(step))
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise UserError(
                f"trainer.default_local_dir={str(self.folder)!r}: the checkpoint of step "
                f"{step} could not be written ({_first_line(error)}); earlier ones are kept. "
                "Free some space and run the same command again to resume."
            ) from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._retire(step)

    def _retire(self, newest: int) -> None:
        if self._max_to_keep is None:
            return
        written = {folder: folder.stat().st_mtime_ns for folder in _step_folders(self.folder)}
        oldest_last = sorted(written, key=lambda folder: written[folder], reverse=True)
        older = [folder for folder in oldest_last if folder.name != f"global_step_{newest}"]
        for folder in older[max(self._max_to_keep - 1, 0) :]:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be removed: %s", folder, error)
            else:
                logger.info("removed checkpoint %s (max_actor_ckpt_to_keep)", folder.name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in ``folder``. Raises UserError if there is none."""
    checkpoint = _find(folder)
    if checkpoint is None:
        raise UserError(
            f"trainer.resume_from_path={str(folder)!r}: not a checkpoint. Name an existing folder "
            "<default_local_dir>/global_step_N."
        )
    return checkpoint


def _find(folder: Path) -> Checkpoint | None:
    match = _STEP_FOLDER.fullmatch(folder.name)
    if match is None or not (folder / STATE_NAME).is_file():
        return None
    return Checkpoint(folder, int(match[1]))


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)]


def _flush_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    _flush(partial)
    os.replace(partial, path)
    _flush(path.parent)


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__
