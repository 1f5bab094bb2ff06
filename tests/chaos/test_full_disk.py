# SPDX-License-Identifier: Apache-2.0
"""A disk that fills up while saving: one line of error, and the checkpoint before it stays good."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.fakes.commands import Conditions, Ended, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, repeatable, sft_arguments, train_arguments

KIBIBYTE = 1024


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with room for one checkpoint of the tiny policy, not for two."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=800k", "tmpfs", str(folder)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("may not mount a file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def check_one_line(ended: Ended, run: Path) -> None:
    """The error names the folder and what to do."""
    assert ended.code == 2, ended.stderr
    (error,) = ended.errors
    assert ended.stderr.splitlines()[-1] == error
    assert "Traceback" not in ended.stderr
    assert f"trainer.default_local_dir='{run}'" in error
    assert "space" in error


def test_checkpoint_survives_a_full_disk_and_the_run_goes_on_with_room(
    material: Material, small_disk: Path, tmp_path: Path
) -> None:
    run = small_disk / "run"
    arguments = train_arguments(material, run, "trainer.save_freq=1", "data.val_files=[]")
    ended = run_command(arguments, folder=tmp_path)
    check_one_line(ended, run)
    assert "earlier ones are kept" in ended.errors[0]
    step = int((run / "latest_checkpointed_iteration.txt").read_text())
    assert 1 <= step < 4
    assert load_file(run / f"global_step_{step}/actor/model.safetensors")
    assert [path.name for path in run.glob("*step_*")] == [f"global_step_{step}"]

    subprocess.run(["mount", "-o", "remount,size=8m", str(small_disk)], check=True)
    assert run_command(arguments, folder=tmp_path).code == 0
    whole = train_arguments(material, tmp_path / "whole", "data.val_files=[]")
    assert run_command(whole, folder=tmp_path).code == 0
    assert repeatable(metrics_of(run)) == repeatable(metrics_of(tmp_path / "whole"))


def test_an_export_to_a_full_disk_leaves_nothing_there(
    material: Material, small_disk: Path, tmp_path: Path
) -> None:
    """``fill`` leaves room for the small files of a model, not for its weights."""
    run, output = tmp_path / "run", small_disk / "model"
    keys = ("trainer.total_training_steps=1", "data.val_files=[]")
    assert run_command(train_arguments(material, run, *keys), folder=tmp_path).code == 0
    fill = small_disk / "fill"
    fill.write_bytes(bytes(700 * KIBIBYTE))
    words = ["export", str(run), "--output", str(output)]
    ended = run_command(words, folder=tmp_path)
    check_refusal(ended, f"--output='{output}'", "cannot be written", "space")
    assert not output.exists()
    fill.unlink()
    assert run_command(words, folder=tmp_path).code == 0
    assert load_file(output / "model.safetensors")


@pytest.mark.parametrize(
    ("command", "limit"),
    [(train_arguments, 200 * KIBIBYTE), (sft_arguments, 20 * KIBIBYTE)],
    ids=["train", "sft"],
)
def test_file_that_cannot_grow(
    command: Callable[..., list[str]], limit: int, material: Material, tmp_path: Path
) -> None:
    """Between the sizes of weights and optimizer, and below both."""
    run = tmp_path / "run"
    arguments = command(material, run, "trainer.save_freq=1", "trainer.total_training_steps=2")
    ended = run_command(arguments, folder=tmp_path)
    assert ended.code == 0
    weights = (run / "global_step_2/actor/model.safetensors").read_bytes()

    again = [*arguments, "trainer.total_training_steps=4", "trainer.logger=file"]
    conditions = Conditions(max_file_bytes=limit)
    ended = run_command(again, folder=tmp_path, conditions=conditions)
    check_one_line(ended, run)
    assert (run / "latest_checkpointed_iteration.txt").read_text() == "2"
    assert (run / "global_step_2/actor/model.safetensors").read_bytes() == weights
    assert not [path for path in run.iterdir() if path.name.startswith(".partial")]
    assert run_command(again, folder=tmp_path).code == 0
