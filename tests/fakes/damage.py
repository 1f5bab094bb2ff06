# SPDX-License-Identifier: Apache-2.0
"""Random damage to the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tandem.checkpoint.manifest import find_damage
from tandem.checkpoint.store import CheckpointStore, find_checkpoint
from tandem.config.schema.trainer import TrainerConfig
from tandem.errors import UserError

_PAGE_BYTES = 4096


def check_random_damage(folder: Path, *, num_trials: int) -> None:
    """Damage the newest checkpoint of a run, one file at a time, each in turn.

    A file is cut, one of its bits is flipped, or a page of it is filled with zeros. A run that
    resumes must refuse the checkpoint and name the file, which is restored afterwards.
    """
    trainer = TrainerConfig(default_local_dir=str(folder.parent))
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    draw = Random(0)
    for trial in range(num_trials):
        path = files[trial % len(files)]
        content = path.read_bytes()
        path.write_bytes(damaged(content, draw))
        with pytest.raises(UserError) as caught:
            find_checkpoint(trainer, CheckpointStore(folder.parent))
        assert f"damaged: {path.relative_to(folder).as_posix()} " in str(caught.value)
        path.write_bytes(content)
    assert find_damage(folder) == []
    checkpoint = find_checkpoint(trainer, CheckpointStore(folder.parent))
    assert checkpoint is not None and checkpoint.folder == folder


def damaged(content: bytes, draw: Random) -> bytes:
    """Return other content of a file."""
    position = draw.randrange(len(content))
    kind = draw.choice(("cut", "flip", "zeros"))
    if kind == "cut":
        return content[:position]
    page = content[position : position + _PAGE_BYTES]
    if kind == "zeros" and any(page):
        return content[:position] + bytes(len(page)) + content[position + len(page) :]
    flipped = bytes([content[position] ^ 1 << draw.randrange(8)])
    return content[:position] + flipped + content[position + 1 :]
