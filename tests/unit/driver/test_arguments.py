# SPDX-License-Identifier: Apache-2.0
"""The arguments of a run that differ from what ``load_config`` returns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.schema.run import RunConfig
from tandem.driver.arguments import load_arguments, load_runnable, refusals
from tandem.errors import UserError


def test_a_default_validation_file_that_is_missing_means_no_validation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    loaded = load_arguments(RunConfig, [])
    assert loaded.config.data.val_files == ()
    (note,) = loaded.warnings
    assert note.startswith("data.val_files is not set, and its default ~/data/rlhf/gsm8k/test.")
    with pytest.raises(UserError, match=r"data.val_files=\[\]: must name a file"):
        load_arguments(RunConfig, ["trainer.val_only=True"])
    named = load_arguments(RunConfig, ["data.val_files=/nowhere.parquet"])
    assert (named.config.data.val_files, named.warnings) == (("/nowhere.parquet",), ())
    default = tmp_path / "data/rlhf/gsm8k/test.parquet"
    default.parent.mkdir(parents=True)
    default.touch()
    assert load_arguments(RunConfig, []).config.data.val_files


def test_a_plan_loads_what_training_refuses() -> None:
    arguments = [
        "actor_rollout_ref.model.path=m",
        "algorithm.adv_estimator=gae",
        "critic.model.lora_rank=8",
    ]
    (refused,) = refusals(load_arguments(RunConfig, arguments).config)
    with pytest.raises(UserError) as caught:
        load_runnable(RunConfig, arguments)
    assert str(caught.value) == str(refused)
