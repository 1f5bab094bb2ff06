# SPDX-License-Identifier: Apache-2.0
"""Random damage to the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tandem.checkpoint.manifest import find_damage
from tandem.checkpoint.store import open_checkpoint, require_whole
from tandem.errors import UserError


def check_random_damage(folder: Path, *, num_trials: int) -> None:
    """Damage one file at a time, each in turn; check that it is refused by name, and restore it."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    draw = Random(0)
    for trial in range(num_trials):
        path = files[trial % len(files)]
        content = path.read_bytes()
        position = draw.randrange(len(content))
        if draw.random() < 0.5:
            path.write_bytes(content[:position])
        else:
            flipped = bytes([content[position] ^ 1 << draw.randrange(8)])
            path.write_bytes(content[:position] + flipped + content[position + 1 :])
        with pytest.raises(UserError) as caught:
            require_whole(open_checkpoint(folder), use="{folder}")
        assert f"damaged: {path.relative_to(folder).as_posix()} " in str(caught.value)
        path.write_bytes(content)
    assert find_damage(folder) == []
