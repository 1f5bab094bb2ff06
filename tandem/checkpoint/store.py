# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a run, in verl's layout: ``global_step_N`` folders and a tracker file.

The tracker names the latest checkpoint. A checkpoint is written beside its final name, flushed to
disk and renamed; the tracker is replaced after that. A crash or a full disk at any moment therefore
leaves the previous checkpoint and the tracker intact. The engines write the contents of a
checkpoint, except ``pipeline.json``, ``config.json``, the configuration of the run, and the
manifest, by which damage is found before a checkpoint is used.
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

from tandem.checkpoint.manifest import MANIFEST_NAME, find_damage, write_manifest
from tandem.config.parse.json_content import read_object
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

logger = logging.getLogger(__name__)

TRACKER_NAME = "latest_checkpointed_iteration.txt"
STATE_NAME = "pipeline.json"
CONFIG_NAME = "config.json"
_PARTIAL = ".partial_step_"
_REPLACED = ".replaced_step_"
_STEP_FOLDER = re.compile(r"global_step_(\d+)")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    folder: Path
    step: int

    def read_config(self) -> dict[str, Any] | None:
        """Return the configuration of the run that wrote the checkpoint; None if it has none."""
        try:
            return read_object(self.folder / CONFIG_NAME)
        except (OSError, ValueError):
            return None

    def read_state(self) -> dict[str, Any]:
        """Return the pipeline's state. Raise UserError if the file is missing or damaged."""
        try:
            return read_object(self.folder / STATE_NAME)
        except (OSError, ValueError) as error:
            reason = error if isinstance(error, OSError) else f"it {error}"
            raise UserError(
                "trainer.resume_from_path",
                str(self.folder),
                rule=f"{STATE_NAME} cannot be read: {reason}",
                remedy="Name a folder global_step_N that tandem wrote, or set "
                "trainer.resume_mode=disable.",
            ) from error


class CheckpointStore:
    """The checkpoints of one run folder.

    Args:
        folder: ``trainer.default_local_dir``.
        max_to_keep: the number of newest checkpoints to keep, None for all.
        config: the configuration of the run as JSON, which each checkpoint keeps.
    """

    def __init__(self, folder: Path, max_to_keep: int | None = None, *, config: str = "") -> None:
        self.folder = folder
        self._max_to_keep = max_to_keep
        self._config = config

    def latest(self) -> Checkpoint | None:
        """Return the checkpoint that the tracker names, None if the run has none yet.

        Raises:
            UserError: the tracker is damaged, or names a checkpoint that does not exist.
        """
        tracker = self.folder / TRACKER_NAME
        try:
            step = int(tracker.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UserError(
                "trainer.resume_mode",
                "auto",
                rule=f"{tracker} holds no step number",
                remedy="Write the step into it, or set trainer.resume_mode=disable.",
            ) from error
        checkpoint = _find(self.folder / f"global_step_{step}")
        if checkpoint is None:
            raise UserError(
                "trainer.resume_mode",
                "auto",
                rule=f"{tracker} names step {step}, which has no checkpoint",
                remedy="Write another step into it, or set trainer.resume_mode=disable.",
            )
        return checkpoint

    def repair(self) -> None:
        """Remove the remains of a killed save. Only the run that owns the folder may call this.

        If the save was replacing an older checkpoint of the same step, the older one is restored.
        """
        for replaced in self.folder.glob(f"{_REPLACED}*"):
            target = self.folder / replaced.name.replace(_REPLACED, "global_step_")
            if not target.exists():
                replaced.rename(target)
        for pattern in (f"{_REPLACED}*", f"{_PARTIAL}*"):
            for remains in self.folder.glob(pattern):
                if remains.is_dir() and not remains.is_symlink():
                    shutil.rmtree(remains)
                else:
                    remains.unlink()

    def set_aside(self, folder: Path, *, after_step: int) -> None:
        """Move the checkpoints after a step, with the tracker, into ``folder``.

        The tracker then names that step, if it has a checkpoint here. It is changed first, so that
        it never names a checkpoint that was moved. A folder in its place is moved too.
        """
        later = [path for path in _step_folders(self.folder) if _step_of(path) > after_step]
        tracker = self.folder / TRACKER_NAME
        if tracker.is_dir():
            folder.mkdir(exist_ok=True)
            tracker.rename(folder / f"{TRACKER_NAME}.folder")
        named = tracker.read_text(errors="replace") if tracker.exists() else ""
        if later:
            folder.mkdir(exist_ok=True)
            _replace_text(folder / TRACKER_NAME, str(max(map(_step_of, later))))
        if not (self.folder / f"global_step_{after_step}").is_dir():
            tracker.unlink(missing_ok=True)
        elif named != str(after_step):
            _replace_text(tracker, str(after_step))
        for path in later:
            path.rename(folder / path.name)

    @contextmanager
    def writing(self, step: int, state: dict[str, Any]) -> Iterator[Path]:
        """Yield an empty folder that becomes the latest checkpoint at the end of the block.

        Raises:
            UserError: the folder could not be written; older checkpoints are untouched.
        """
        target = self.folder / f"global_step_{step}"
        partial = self.folder / f"{_PARTIAL}{step}"
        replaced = self.folder / f"{_REPLACED}{step}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            (partial / STATE_NAME).write_text(json.dumps(state))
            if self._config:
                (partial / CONFIG_NAME).write_text(self._config, encoding="utf-8")
            write_manifest(partial)
            _flush_tree(partial)
            if target.exists():
                target.rename(replaced)
            partial.rename(target)
            _replace_text(self.folder / TRACKER_NAME, str(step))
            shutil.rmtree(replaced, ignore_errors=True)
        except OSError as error:
            _undo(partial, replaced, target=target)
            raise UserError(
                "trainer.default_local_dir",
                str(self.folder),
                rule=f"the checkpoint of step {step} could not be written "
                f"({_first_line(error)}); earlier ones are kept",
                remedy="Free some space and run the same command again to resume.",
            ) from error
        except BaseException:
            _undo(partial, replaced, target=target)
            raise
        self._retire(step)

    def _retire(self, newest: int) -> None:
        if self._max_to_keep is None:
            return
        written = {folder: folder.stat().st_mtime_ns for folder in _step_folders(self.folder)}
        oldest_last = sorted(written, key=lambda one: (written[one], _step_of(one)), reverse=True)
        older = [folder for folder in oldest_last if folder.name != f"global_step_{newest}"]
        for folder in older[max(self._max_to_keep - 1, 0) :]:
            try:
                shutil.rmtree(folder)
            except OSError as error:
                logger.warning("the old checkpoint %s could not be removed: %s", folder, error)
            else:
                logger.info("removed checkpoint %s (max_actor_ckpt_to_keep)", folder.name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Return the checkpoint in ``folder``. Raise UserError if there is none."""
    checkpoint = _find(folder)
    if checkpoint is None:
        raise UserError(
            "trainer.resume_from_path",
            str(folder),
            rule="not a checkpoint",
            remedy="Name an existing folder <default_local_dir>/global_step_N.",
        )
    return checkpoint


def find_checkpoint(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """Return the checkpoint to continue from, None to start anew; change nothing.

    ``trainer.resume_mode`` decides. ``auto``: the latest checkpoint of the run folder, if there is
    one. ``disable``: none. ``resume_path``: the folder of ``trainer.resume_from_path``.

    Raises:
        UserError: the wanted checkpoint does not exist or is damaged.
    """
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        checkpoint = open_checkpoint(trainer.resume_folder)
    else:
        checkpoint = store.latest()
    if checkpoint is not None:
        require_whole(
            checkpoint, use="trainer.resume_mode=resume_path trainer.resume_from_path={folder}"
        )
    return checkpoint


def require_whole(checkpoint: Checkpoint, *, use: str) -> None:
    """Compare all files of a checkpoint with its manifest; warn if it has none.

    Args:
        use: the words that choose another checkpoint, with ``{folder}`` in the place of its folder.

    Raises:
        UserError: a file is damaged; the message names the newest whole checkpoint before it.
    """
    folder = checkpoint.folder
    damage = find_damage(folder)
    if damage is None:
        logger.warning("%s has no %s: damage in it cannot be found", folder, MANIFEST_NAME)
    if not damage:
        return
    earlier = [path for path in _step_folders(folder.parent) if _step_of(path) < checkpoint.step]
    newest_first = sorted(earlier, key=_step_of, reverse=True)
    whole = next((path for path in newest_first if _find(path) and find_damage(path) == []), None)
    offer = "There is no whole one before it" if whole is None else "The one before it is whole"
    chosen = "" if whole is None else f": {use.format(folder=whole)}"
    raise UserError(
        "checkpoint",
        str(folder),
        rule=f"it is damaged: {'; '.join(damage)}",
        remedy=f"{offer}{chosen}. tandem doctor {folder.parent} checks all checkpoints.",
    )


def describe_checkpoints(run_folder: Path) -> dict[str, str]:
    """Return the condition of each checkpoint of a run: "" if it is whole, else its damage.

    Raises:
        UserError: the folder has no checkpoint.
    """
    folders = sorted(_step_folders(run_folder), key=_step_of) if run_folder.is_dir() else []
    if not folders:
        raise UserError(
            "RUN",
            str(run_folder),
            rule="has no checkpoint",
            remedy="Name the folder of a run, which has folders global_step_N.",
        )
    return {folder.name: _condition(folder) for folder in folders}


def _condition(folder: Path) -> str:
    damage = find_damage(folder)
    if damage is None:
        return f"it has no {MANIFEST_NAME}, and damage cannot be found"
    return "; ".join(damage)


def _find(folder: Path) -> Checkpoint | None:
    match = _STEP_FOLDER.fullmatch(folder.name)
    try:
        is_complete = match is not None and (folder / STATE_NAME).is_file()
    except OSError:  # a name that is too long
        return None
    return Checkpoint(folder, int(match[1])) if match is not None and is_complete else None


def _step_folders(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if _STEP_FOLDER.fullmatch(path.name)]


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("global_step_"))


def _undo(partial: Path, replaced: Path, *, target: Path) -> None:
    """Remove an unfinished save, and restore the checkpoint that it was replacing."""
    shutil.rmtree(partial, ignore_errors=True)
    if not replaced.exists():
        return
    shutil.rmtree(target, ignore_errors=True)
    try:
        replaced.rename(target)
    except OSError as error:
        logger.warning("%s is restored when a run starts in its folder: %s", target, error)


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
