# SPDX-License-Identifier: Apache-2.0
"""No start of a run overwrites what an earlier one left in its folder."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest

from tandem.checkpoint.store import CheckpointStore
from tandem.config.schema.trainer import TrainerConfig
from tandem.driver.set_aside import set_aside, set_dumps_aside
from tandem.metrics.jsonl import BEFORE_FIRST_STEP, read_records
from tandem.report.run_folder import SETTINGS_FILE

NOW = datetime(2026, 1, 2, 3, 4, 5)
NAME = "before-2026-01-02-030405"
OWN_FILES = (
    "config.json",
    "report.html",
    "restarts.jsonl",
    "rewards.log",
    "summary.json",
    "trace.json",
)
JSONL_FILES = ("metrics.jsonl", "rollouts.jsonl", "settings.jsonl")


def trainer_of(folder: Path) -> TrainerConfig:
    return TrainerConfig(
        default_local_dir=str(folder / "run"),
        rollout_data_dir=str(folder / "dumps"),
        validation_data_dir=str(folder / "validation"),
    )


@pytest.fixture
def earlier(tmp_path: Path) -> TrainerConfig:
    """A run of five steps with all kinds of records, and a file of the user in its folder."""
    trainer = trainer_of(tmp_path)
    run = trainer.run_folder
    store = CheckpointStore(run)
    for step in (2, 4):
        with store.writing(step, {}) as folder:
            (folder / "w").write_text("weights")
    lines = "".join(json.dumps({"step": step}) + "\n" for step in (1, 2, 3, 4, 2, 5))
    for name in JSONL_FILES:
        (run / name).write_text(lines)
    for name in (*OWN_FILES, "notes.txt", "placement.json", "run.lock"):
        (run / name).write_text("of the earlier run")
    (run / "tensorboard").mkdir()
    for folder in (trainer.rollout_data_folder, trainer.validation_data_folder):
        folder.mkdir()
        for step in range(1, 6):
            (folder / f"{step}.jsonl").write_text("dump")
        (folder / "notes.jsonl").write_text("of the user")
    return trainer


def start(trainer: TrainerConfig, after_step: int) -> list[Path]:
    return set_aside(trainer, CheckpointStore(trainer.run_folder), after_step=after_step, now=NOW)


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_new_run_finds_its_folder_empty_but_for_files_that_are_not_records(
    earlier: TrainerConfig,
) -> None:
    run, before = earlier.run_folder, names_in(earlier.run_folder)
    dumps = (earlier.rollout_data_folder, earlier.validation_data_folder)
    assert start(earlier, BEFORE_FIRST_STEP) == [folder / NAME for folder in (run, *dumps)]
    kept = {"notes.txt", "placement.json", "run.lock"}
    assert names_in(run) == {NAME, *kept}
    assert names_in(run / NAME) == before - kept
    assert (CheckpointStore(run / NAME).latest() or pytest.fail()).step == 4
    for folder in dumps:
        assert names_in(folder) == {NAME, "notes.jsonl"}
        assert names_in(folder / NAME) == {f"{step}.jsonl" for step in range(1, 6)}


def test_a_resumed_run_keeps_what_it_continues_and_moves_the_rest(earlier: TrainerConfig) -> None:
    run = earlier.run_folder
    start(earlier, 2)
    for name in JSONL_FILES:
        assert [record["step"] for record in read_records(run / name)] == [1, 2, 2]
        assert [record["step"] for record in read_records(run / NAME / name)] == [3, 4, 5]
    later = {"global_step_4", "latest_checkpointed_iteration.txt", "config.json"}
    assert names_in(run / NAME) == {*JSONL_FILES, *later}
    assert {"global_step_2", *OWN_FILES, "tensorboard"} <= names_in(run)
    assert (CheckpointStore(run).latest() or pytest.fail()).step == 2
    assert names_in(earlier.rollout_data_folder / NAME) == {"3.jsonl", "4.jsonl", "5.jsonl"}


def test_nothing_is_moved_if_nothing_would_be_overwritten(earlier: TrainerConfig) -> None:
    start(earlier, 4)
    before = names_in(earlier.run_folder)
    assert start(earlier, 4) == []
    assert names_in(earlier.run_folder) == before
    fresh = trainer_of(earlier.run_folder / "another")
    fresh.run_folder.mkdir(parents=True)
    assert start(fresh, BEFORE_FIRST_STEP) == []


def test_two_starts_within_a_second_have_folders_of_their_own(earlier: TrainerConfig) -> None:
    start(earlier, BEFORE_FIRST_STEP)
    (earlier.run_folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert start(earlier, BEFORE_FIRST_STEP) == [earlier.run_folder / f"{NAME}-2"]
    assert read_records(earlier.run_folder / f"{NAME}-2" / "metrics.jsonl") == [{"step": 1}]


def test_a_repeated_validation_moves_only_the_dump_of_its_step(earlier: TrainerConfig) -> None:
    before = names_in(earlier.run_folder)
    set_dumps_aside(earlier, of_step=4, now=NOW)
    assert names_in(earlier.run_folder) == before
    folder = earlier.validation_data_folder
    assert names_in(folder / NAME) == {"4.jsonl"}
    assert not (folder / "4.jsonl").exists() and (folder / "5.jsonl").exists()


def test_exported_models_of_later_steps_are_moved_with_their_checkpoints(
    earlier: TrainerConfig,
) -> None:
    run = earlier.run_folder
    for step in (2, 4):
        (run / f"model_step_{step}").mkdir()
    start(earlier, 2)
    assert (run / "model_step_2").is_dir()
    assert not (run / "model_step_4").exists()
    assert (run / NAME / "model_step_4").is_dir()


def test_settings_of_a_start_that_trained_no_step_do_not_remain(earlier: TrainerConfig) -> None:
    run = earlier.run_folder
    start(earlier, 5)
    with (run / SETTINGS_FILE).open("a") as file:
        file.write('{"step": 6, "changed": {}}\n')
    start(earlier, 5)
    assert max(record["step"] for record in read_records(run / SETTINGS_FILE)) <= 5
