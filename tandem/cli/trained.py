# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that the argument RUN names: a run's folder, or one of its ``global_step_N``."""

from __future__ import annotations

from pathlib import Path

from tandem.checkpoint.store import TRACKER_NAME, Checkpoint, CheckpointStore, open_checkpoint
from tandem.config.derived.adapters import ADAPTER_CONFIG
from tandem.errors import UserError
from tandem.report.run_folder import require_folder


def find_trained(run_folder: Path, step: int | None) -> Checkpoint:
    """Return the newest checkpoint of a run, or that of a step.

    Raises:
        UserError: there is no such folder, or no such checkpoint in it.
    """
    if run_folder.name.startswith("global_step_"):
        if step is not None:
            raise UserError(
                "--step",
                step,
                rule=f"RUN={str(run_folder)!r} is a single checkpoint",
                remedy="Leave --step out, or name the folder of the run.",
            )
        return open_checkpoint(run_folder)
    require_folder(run_folder)
    if step is not None:
        return _checkpoint_of(run_folder, step)
    latest = CheckpointStore(run_folder).latest()
    if latest is None:
        raise _has_none(run_folder)
    return latest


def _checkpoint_of(run_folder: Path, step: int) -> Checkpoint:
    folder = run_folder / f"global_step_{step}"
    if not folder.is_dir():
        others = ", ".join(sorted(path.name for path in run_folder.glob("global_step_*")))
        raise UserError(
            "--step",
            step,
            rule=f"{run_folder} has no {folder.name}",
            remedy=f"It has: {others or 'none'}.",
        )
    return open_checkpoint(folder)


def _has_none(folder: Path) -> UserError:
    runs = sorted(path.parent.name for path in folder.glob(f"*/{TRACKER_NAME}"))
    if runs:
        rule, remedy = "is not a run, but has some", f"Add one of these: {', '.join(runs)}."
    elif folder.parent.name.startswith("global_step_"):
        rule, remedy = "is a part of a checkpoint", f"Name the checkpoint, {folder.parent}."
    elif (folder / ADAPTER_CONFIG).is_file():
        rule = "is an adapter that belongs to no run"
        remedy = "Merge it by peft, or train from it by actor_rollout_ref.model.lora_adapter_path."
    else:
        rule = "has no checkpoint"
        remedy = "Train with trainer.save_freq=-1, which saves the last step, or 1 or more."
    return UserError("RUN", str(folder), rule=rule, remedy=remedy)
