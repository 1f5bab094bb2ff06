# SPDX-License-Identifier: Apache-2.0
"""The lines at the end of a run: where its model is, and the next commands."""

from __future__ import annotations

import shlex
from pathlib import Path

from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.trainer import TrainerConfig
from tandem.engines.checkpoint import SHARDED_FILE
from tandem.pipeline.progress import RunSummary


def describe_end(
    trainer: TrainerConfig, summary: RunSummary, *, total_steps: int
) -> tuple[str, ...]:
    """Return lines that tell how far the run came, where it was saved and what to do next."""
    report = f"next: {_command('report', trainer.run_folder)}"
    if trainer.val_only:
        return (report,)
    stopped = "stopped after " if summary.stopped_early else ""
    state = f"{stopped}step {summary.last_step} of {total_steps}"
    if summary.num_left:
        state += f"; {summary.num_left} prompt(s) left over at the end of the data"
    saved = _saved_folder(trainer.run_folder, step=summary.last_step)
    if saved is None:
        reason = "nothing was trained" if summary.last_step == 0 else "trainer.save_freq=0"
        return (f"{state}; no checkpoint was written: {reason}", report)
    continues = "; the same command continues from there" if summary.stopped_early else ""
    sample = f"next: {_command('sample', trainer.run_folder)} PROMPT"
    export = f"next: {_command('export', trainer.run_folder)} --output MODEL"
    return (f"{state}; {saved}{continues}", report, sample, export)


def _saved_folder(run_folder: Path, *, step: int) -> str | None:
    checkpoint = CheckpointStore(run_folder).latest()
    if checkpoint is None or checkpoint.step != step:
        return None
    model = checkpoint.folder / "actor"
    if (model / SHARDED_FILE).is_file():
        return f"the checkpoint is in {checkpoint.folder}"
    return f"the model is in {model}"


def _command(name: str, run_folder: Path) -> str:
    return f"tandem {name} {shlex.quote(str(run_folder))}"
