# SPDX-License-Identifier: Apache-2.0
"""A second start in the folder of a run loses nothing of the first and mixes nothing in silence."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.commands import Ended, check_refusal, run_command
from tests.fakes.tiny_run import Material, metrics_of, sft_arguments, train_arguments

Arguments = Callable[..., list[str]]
LEARNING_RATE = {
    train_arguments: "actor_rollout_ref.actor.optim.lr",
    sft_arguments: "optim.lr",
}
COMMANDS = pytest.mark.parametrize("command", [train_arguments, sft_arguments])
NO_VALIDATION = ("data.val_files=[]", "trainer.total_training_steps=3")


@pytest.fixture(scope="module")
def finished(
    material: Material, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Arguments], Path]:
    """Return the folder of a run of three steps, each saved. Copy it before writing into it."""
    folders: dict[Arguments, Path] = {}

    def run(command: Arguments) -> Path:
        if command not in folders:
            folder = tmp_path_factory.mktemp("finished")
            arguments = command(material, folder / "run", *NO_VALIDATION, "trainer.save_freq=1")
            ended = run_command(arguments, folder=folder)
            assert ended.code == 0, ended.stderr
            folders[command] = folder / "run"
        return folders[command]

    return run


@pytest.fixture
def again(
    finished: Callable[[Arguments], Path], material: Material, tmp_path: Path
) -> Callable[..., Ended]:
    """Start once more in a copy of the folder, ``tmp_path/run``."""

    def start(command: Arguments, *keys: str) -> Ended:
        run = tmp_path / "run"
        if not run.exists():
            shutil.copytree(finished(command), run)
        return run_command(command(material, run, *NO_VALIDATION, *keys), folder=tmp_path)

    return start


def folder_before(run: Path, ended: Ended) -> Path:
    """Return the folder of the earlier run, which the command must name."""
    (folder,) = run.glob("before-*")
    assert str(folder) in ended.stderr
    return folder


@COMMANDS
def test_a_run_that_starts_anew_moves_the_earlier_one(
    command: Arguments,
    finished: Callable[[Arguments], Path],
    again: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    ended = again(command, "trainer.resume_mode=disable", "trainer.total_training_steps=1")
    assert ended.code == 0, ended.stderr
    run = tmp_path / "run"
    before = folder_before(run, ended)
    earlier = {path.relative_to(finished(command)) for path in finished(command).rglob("*")}
    assert {path.relative_to(before) for path in before.rglob("*")} == earlier
    assert (before / "metrics.jsonl").read_bytes() == (
        finished(command) / "metrics.jsonl"
    ).read_bytes()
    assert list(metrics_of(run)) == [1]
    assert [path.name for path in run.glob("global_step_*")] == ["global_step_1"]


@COMMANDS
def test_a_run_that_resumes_from_an_earlier_step_keeps_the_later_ones(
    command: Arguments, again: Callable[..., Ended], tmp_path: Path
) -> None:
    run, key = tmp_path / "run", LEARNING_RATE[command]
    keys = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_1")
    ended = again(command, *keys, f"{key}=0.005", "trainer.save_freq=-1")
    assert ended.code == 0, ended.stderr
    assert f"settings changed since step 1: {key}: 0.01 -> 0.005" in ended.stderr
    before = folder_before(run, ended)
    assert list(metrics_of(before)) == [2, 3] and list(metrics_of(run)) == [1, 2, 3]
    moved = {path.name for path in before.glob("global_step_*")}
    assert moved == {"global_step_2", "global_step_3"}
    kept = {path.name for path in run.glob("global_step_*")}
    assert kept == {"global_step_1", "global_step_3"}
    page = report_of(run, tmp_path)
    assert f"from step 2: {key}</th><td>0.01 &rarr; 0.005<" in page
    changed = f"{key.rsplit('.', maxsplit=1)[0]}.weight_decay=0.5"
    later = again(command, f"{key}=0.005", changed, "trainer.total_training_steps=4")
    assert later.code == 0, later.stderr
    assert re.search(r"settings changed since step 3: \S*weight_decay: \S+ -> 0.5", later.stderr)
    assert "from step 4: " in report_of(run, tmp_path)
    assert len(list(run.glob("before-*"))) == 1


def report_of(run: Path, folder: Path) -> str:
    ended = run_command(["report", str(run), "--output", "report.html"], folder=folder)
    assert ended.code == 0, ended.stderr
    return (folder / "report.html").read_text()


@COMMANDS
def test_a_finished_run_with_other_settings_is_no_success(
    command: Arguments,
    finished: Callable[[Arguments], Path],
    again: Callable[..., Ended],
    tmp_path: Path,
) -> None:
    key = LEARNING_RATE[command]
    says = ("trainer.total_training_steps=3", f"{key}: 0.01 -> 0.02", "resume_mode=disable")
    check_refusal(again(command, f"{key}=0.02", "trainer.save_freq=1"), *says)
    config = finished(command) / "config.json"
    assert (tmp_path / "run/config.json").read_bytes() == config.read_bytes()
    ended = again(command, "trainer.save_freq=1")
    assert ended.code == 0, ended.stderr
    assert "settings changed" not in ended.stderr and not list((tmp_path / "run").glob("before*"))


def test_another_experiment_is_refused_unless_it_is_meant(
    again: Callable[..., Ended], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    keys = ("algorithm.adv_estimator=rloo", "trainer.total_training_steps=4")
    says = ("trainer.resume_mode='auto'", "algorithm.adv_estimator: grpo -> rloo", "resume_path")
    check_refusal(again(train_arguments, *keys), *says)
    meant = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={run}/global_step_3")
    ended = again(train_arguments, *keys, *meant)
    assert ended.code == 0, ended.stderr
    assert list(metrics_of(run)) == [1, 2, 3, 4]
    stored = json.loads((run / "global_step_4/config.json").read_text())
    assert stored["algorithm"]["adv_estimator"] == "rloo"


@COMMANDS
def test_the_end_names_the_model_and_the_next_commands(
    command: Arguments, material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = run_command(command(material, run, *NO_VALIDATION), folder=tmp_path)
    assert ended.code == 0, ended.stderr
    for text in (f"{run}/global_step_3/actor", f"tandem report {run}", f"tandem export {run} "):
        assert text in ended.stderr
    ended = run_command(["export", str(run), "--output", "model"], folder=tmp_path)
    assert ended.code == 0, ended.stderr


def test_a_run_that_saves_nothing_says_so_and_is_kept_too(
    material: Material, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    arguments = train_arguments(material, run, *NO_VALIDATION, "trainer.save_freq=0")
    first = run_command(arguments, folder=tmp_path)
    assert (first.code, list(run.glob("global_step_*"))) == (0, [])
    assert "no checkpoint was written: trainer.save_freq=0" in first.stderr
    second = run_command(arguments, folder=tmp_path)
    assert second.code == 0, second.stderr
    assert list(metrics_of(folder_before(run, second))) == list(metrics_of(run)) == [1, 2, 3]
