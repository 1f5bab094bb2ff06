# SPDX-License-Identifier: Apache-2.0
"""The quickstart's arguments, closing words and last line; its training is tested elsewhere."""

import json
from pathlib import Path

import pytest

from tandem.errors import UserError
from tandem.quickstart import command, materials
from tandem.quickstart.closing import Accuracies, describe_end

NEEDED = "the quickstart needs a trained model, and its accuracy before and after"


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("trainer.save_freq=0", NEEDED),
        ("trainer.val_only=True", NEEDED),
        ("trainer.test_freq=-1", NEEDED),
        ("trainer.val_before_train=False", NEEDED),
        ("data.val_files=mine.parquet", "the quickstart makes this itself"),
        ("++trainer.default_local_dir=mine", "the quickstart makes this itself"),
        ("trainer.n_gpus_per_node=2", "the quickstart trains in one process"),
    ],
)
def test_keys_that_would_leave_no_result_are_refused_before_anything_is_made(
    tmp_path: Path, override: str, rule: str
) -> None:
    with pytest.raises(UserError) as caught:
        command.run(["--folder", str(tmp_path / "all"), override])
    assert caught.value.rule == rule
    assert not (tmp_path / "all").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="--folder=.*Not a directory"):
        command.run(["--folder", str(tmp_path / "file")])


def test_the_closing_words_fit_a_terminal() -> None:
    run = Path("outputs/quickstart/grpo")
    text = describe_end(
        Accuracies(0.0898, 0.9648, 0.095, 0.975),
        run_folder=run,
        model=run / "global_step_140/actor",
        report=run / "report.html",
        seconds=113.4,
        question="Sort the digits 8529.",
    )
    assert "In 113 s," in text
    assert "solves 96.5 % of 256 held-out problems; before GRPO it solved 9.0 %." in text
    assert "solves 97.5 % of 200 problems with unseen numbers; before, 9.5 %." in text
    assert '  tandem sample outputs/quickstart/grpo "Sort the digits 8529."\n' in text
    assert "  tandem export outputs/quickstart/grpo --output my-model\n" in text
    assert max(map(len, text.splitlines())) <= 80


def test_the_last_line_is_one_object_and_the_words_before_it_are_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in ("NUM_DEMONSTRATIONS", "NUM_TRAIN", "NUM_TEST", "NUM_UNSEEN"):
        monkeypatch.setattr(materials, number, 32)
    monkeypatch.setattr(command, "warm_start", lambda materials, folder, **_: materials.model)
    keys = ("data.train_batch_size=4", "data.max_response_length=4", "trainer.test_freq=1")
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=4"
    steps = "trainer.total_training_steps=1"
    assert command.run(["--folder", str(tmp_path), *keys, mini, steps]) == 0

    shown = capsys.readouterr()
    summary = json.loads(shown.out.splitlines()[-1])
    assert (Path(summary["model"]) / "config.json").is_file()
    assert Path(summary["report"]).is_file()
    assert f"The model is in {summary['model']}." in shown.err
    assert (tmp_path / "grpo" / "summary.json").is_file()


def test_keys_may_stand_before_and_after_options(tmp_path: Path) -> None:
    keys = ("trainer.save_freq=0", "trainer.n_gpus_per_node=2")
    with pytest.raises(UserError, match="the quickstart trains in one process"):
        command.run([keys[0], "--folder", str(tmp_path / "all"), keys[1]])
