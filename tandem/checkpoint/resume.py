# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a run continues from, by ``trainer.resume_mode``."""

from __future__ import annotations

from tandem.checkpoint.store import Checkpoint, CheckpointStore, open_checkpoint
from tandem.config.schema.trainer import TrainerConfig


def find_checkpoint(trainer: TrainerConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint to continue from, None to start anew; clears away what a killed save has left.

    ``auto``: the latest of the run folder, if there is one; ``disable``: none; ``resume_path``: the
    folder named by ``resume_from_path``.

    Raises:
        UserError: the checkpoint that was asked for is not there.
    """
    store.mend()
    if trainer.resume_mode == "disable":
        return None
    if trainer.resume_mode == "resume_path":
        return open_checkpoint(trainer.resume_folder)
    return store.latest()
