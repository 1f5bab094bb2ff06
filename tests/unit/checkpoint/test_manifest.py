# SPDX-License-Identifier: Apache-2.0
"""Damage anywhere in a checkpoint is found and named, and the checkpoint is not used."""

from __future__ import annotations

import logging
import shutil
import tracemalloc
from pathlib import Path
from random import Random

import pytest

from tandem.checkpoint.manifest import MANIFEST_NAME, find_damage, write_manifest
from tandem.checkpoint.store import CheckpointStore, open_checkpoint, require_whole
from tandem.errors import UserError
from tests.fakes.damage import check_random_damage

USE = "trainer.resume_from_path={folder}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints of the steps 1 to 3."""
    store = CheckpointStore(tmp_path / "run", config="{}")
    for step in (1, 2, 3):
        with store.writing(step, {"step": step}) as folder:
            (folder / "actor").mkdir()
            (folder / "actor" / "weights").write_bytes(Random(step).randbytes(5000))
            (folder / "actor" / "empty").write_bytes(b"")
    return tmp_path / "run"


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def test_whole_checkpoint_has_no_damage(run: Path) -> None:
    assert find_damage(run / "global_step_3") == []


def test_random_damage_is_found_and_named(run: Path) -> None:
    check_random_damage(run / "global_step_3", num_trials=50)


def test_files_that_are_missing_or_folders_are_named(run: Path) -> None:
    folder = run / "global_step_3"
    (folder / "config.json").unlink()
    (folder / "actor" / "weights").unlink()
    (folder / "actor" / "weights").mkdir()
    assert find_damage(folder) == ["actor/weights is not a file", "config.json is missing"]


def test_refusal_offers_the_newest_whole_one_before(run: Path) -> None:
    newest = open_checkpoint(run / "global_step_3")
    flip(newest.folder / "actor" / "weights")
    flip(run / "global_step_2" / "pipeline.json")
    with pytest.raises(UserError) as caught:
        require_whole(newest, use=USE)
    assert "actor/weights has other contents" in str(caught.value)
    assert f"trainer.resume_from_path={run / 'global_step_1'}" in str(caught.value)


def test_refusal_says_that_no_whole_one_is_left(run: Path) -> None:
    oldest = open_checkpoint(run / "global_step_1")
    flip(oldest.folder / MANIFEST_NAME)
    with pytest.raises(UserError, match="no whole one before it"):
        require_whole(oldest, use=USE)


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"[" * 100_000, b'{"files": {"a": 1}}'])
def test_a_foreign_manifest_is_damage(content: bytes, run: Path) -> None:
    (run / "global_step_3" / MANIFEST_NAME).write_bytes(content)
    assert find_damage(run / "global_step_3") == [f"{MANIFEST_NAME} is damaged"]


def test_checkpoint_without_manifest_is_used_with_a_warning(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (run / "global_step_3" / MANIFEST_NAME).unlink()
    with caplog.at_level(logging.WARNING):
        require_whole(open_checkpoint(run / "global_step_3"), use=USE)
    assert f"has no {MANIFEST_NAME}" in caplog.text


def test_comparing_takes_little_memory(run: Path) -> None:
    """Buffers of megabytes for each file and save were kept by the allocator, 1.4 KB a step."""
    (run / "global_step_3" / "actor" / "weights").write_bytes(bytes(8 << 20))
    tracemalloc.start()
    try:
        find_damage(run / "global_step_3")
        write_manifest(run / "global_step_3")
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 8 * (256 << 10) + (1 << 20)  # at most eight threads


def test_a_checkpoint_can_be_moved(run: Path, tmp_path: Path) -> None:
    moved = shutil.move(run / "global_step_3", tmp_path / "global_step_9")
    assert find_damage(moved) == []
