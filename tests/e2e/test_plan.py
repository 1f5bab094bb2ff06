# SPDX-License-Identifier: Apache-2.0
"""``tandem plan`` on the machine of the run: what it shows, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.checkpoint.lock import exclusive
from tandem.cli.main import main
from tests.fakes.tiny_run import Material, sft_arguments, train_arguments


def planned(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The plan as JSON; the command must succeed."""
    code = main(["plan", "--json", *arguments])
    output = capsys.readouterr()
    assert code == 0, output.err
    return json.loads(output.out)


def test_it_shows_what_runs_where_and_from_which_step(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    keys = train_arguments(material, run, "trainer.total_training_steps=1", "trainer.save_freq=1")
    plan = planned(keys[1:], capsys)
    assert plan["run"]["algorithm"].startswith("grpo, policy loss vanilla, 4 samples")
    assert plan["run"]["reward"].startswith("graded of ")
    assert plan["run"]["run folder"] == str(run)
    assert (
        plan["run"]["devices"] == "1 cpu (trainer.device=auto, and it is the first that is found)"  # noqa: E501
    )
    assert plan["run"]["starts"] == "at step 1, as a new run"
    assert plan["pools"][0]["memory_gib"] is None
    assert not run.exists(), "a plan writes nothing"
    assert main(keys) == 0
    capsys.readouterr()
    longer = [*keys[1:], "trainer.total_training_steps=2"]
    records = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert planned(longer, capsys)["run"]["starts"] == f"after step 1, from {run / 'global_step_1'}"
    assert planned(keys[1:], capsys)["run"]["starts"].startswith("not at all: ")
    anew = planned([*keys[1:], "trainer.resume_mode=disable"], capsys)["run"]["starts"]
    assert anew == "at step 1, as a new run; the earlier one is moved aside"
    other = planned([*longer, "actor_rollout_ref.actor.optim.lr=0.5"], capsys)["warnings"]
    changed = "actor_rollout_ref.actor.optim.lr: 0.01 -> 0.5"
    assert any("changed since step 1" in text and changed in text for text in other)
    assert records == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def test_it_counts_the_prompts_that_are_left(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = ["data.filter_overlong_prompts=True", "data.max_prompt_length=32"]
    keys = train_arguments(material, tmp_path, *lengths, "~trainer.total_training_steps")[1:]
    plan = planned(keys, capsys)
    assert 0 < plan["steps_per_epoch"] < 10
    assert not any("steps are counted before" in warning for warning in plan["warnings"])
    elsewhere = planned(["--elsewhere", *keys], capsys)
    assert elsewhere["steps_per_epoch"] == 10
    assert any("steps are counted before" in warning for warning in elsewhere["warnings"])


def test_supervised_training_is_checked_too(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = sft_arguments(material, tmp_path)
    assert planned(keys, capsys)["run"]["starts"] == "at step 1, as a new run"
    assert main(["plan", *keys, "data.prompt_key=riddle"]) == 2
    assert "riddle" in capsys.readouterr().err
    assert main(["plan", "--elsewhere", *keys, "data.prompt_key=riddle"]) == 0


def test_warnings_of_the_checks_are_in_the_plan_once(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = train_arguments(material, tmp_path, "data.max_response_length=5000")[1:]
    warnings = planned(keys, capsys)["warnings"]
    assert len([text for text in warnings if "positions; tokens beyond them" in text]) == 1


def test_what_is_not_built_is_refused_behind_the_plan(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = train_arguments(material, tmp_path)[1:]
    adapted, message = "reward_model={enable:True,model:{lora_rank:8}}", "are not built yet"
    for option in ([], ["--elsewhere"]):
        assert main(["plan", *option, "--json", *keys, adapted]) == 2
        printed = capsys.readouterr()
        assert message in printed.err
        assert message in json.loads(printed.out)["refusals"][0]


def test_a_device_that_is_not_here_is_refused_unless_the_plan_is_for_elsewhere(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [*train_arguments(material, tmp_path)[1:], "trainer.device=npu"]
    assert main(["plan", *keys]) == 2
    assert "trainer.device='npu': npu cannot be used here" in capsys.readouterr().err
    told = planned(["--elsewhere", *keys], capsys)["warnings"]
    assert any("trainer.device=npu: the plan does not check" in warning for warning in told)


def test_a_folder_in_use_is_refused(
    material: Material, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with exclusive(tmp_path):
        assert main(["plan", *train_arguments(material, tmp_path)[1:]]) == 2
    assert "another run is using the folder" in capsys.readouterr().err
