# SPDX-License-Identifier: Apache-2.0
"""Folders of runs with odd names and contents, and a closed standard output."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakes.commands import run_command
from tests.fakes.tiny_run import Material, metrics_of, train_arguments

SHORT = ("trainer.total_training_steps=1", "data.val_files=[]", "trainer.save_freq=1")


@pytest.mark.parametrize("name", ["-\U0001f6b2 at 10:30", "x" * 255])
def test_a_run_may_have_any_name_that_a_folder_may_have(
    name: str, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / name
    quoted = f"trainer.default_local_dir='{run}'"
    arguments = train_arguments(material, run, *SHORT, quoted)
    assert run_command(arguments, folder=tmp_path).code == 0
    longer = [*arguments, "trainer.total_training_steps=2"]
    ended = run_command(longer, folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert list(metrics_of(run)) == [1, 2]
    for words in (["report", str(run)], ["export", str(run), "--output", str(tmp_path / "model")]):
        ended = run_command(words, folder=tmp_path)
        assert ended.code == 0, ended.stderr


@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_folder_in_the_place_of_a_record_is_moved_aside(
    name: str, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    (run / name / "of_somebody").mkdir(parents=True)
    ended = run_command(train_arguments(material, run, *SHORT), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    assert "moved the earlier run to" in ended.stderr
    assert (run / name).is_file()
    assert len(list(run.glob(f"before-*/{name}/of_somebody"))) == 1


def test_a_run_with_closed_outputs_trains(material: Material, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = train_arguments(material, run, *SHORT)
    shell = ["sh", "-c", '"$0" -m tandem "$@" >&- 2>&-', sys.executable, *words]
    assert subprocess.run(shell, env=dict(os.environ), check=False).returncode == 0
    assert list(metrics_of(run)) == [1]
    assert (run / "global_step_1/actor/model.safetensors").is_file()
