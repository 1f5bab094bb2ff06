# SPDX-License-Identifier: Apache-2.0
"""The settings that changed since a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tandem.config.check.continuation import (
    ANOTHER_EXPERIMENT,
    changed_settings,
    settings_json,
)
from tandem.config.parse.keys import keys_of
from tandem.config.parse.overrides import load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig


def run_config(*keys: str) -> RunConfig:
    return load_config(RunConfig, keys).config


def test_every_changed_key_is_named_with_both_values() -> None:
    earlier = json.loads(settings_json(run_config("data.val_files=[a.parquet]")))
    config = run_config(
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.rollout.n=4",
        "data.val_files=[a.parquet,b.parquet]",
        "pools.actor-train.platform=cpu",
        "custom_reward_function.reward_kwargs={scale:2}",
        "trainer.max_actor_ckpt_to_keep=3",
    )
    assert [str(change) for change in changed_settings(config, earlier)] == [
        "actor_rollout_ref.actor.optim.lr: 1e-06 -> 0.01",
        "actor_rollout_ref.rollout.n: 8 -> 4",
        "custom_reward_function.reward_kwargs: {} -> {scale:2}",
        "data.val_files: [a.parquet] -> [a.parquet,b.parquet]",
        "pools.actor-train.platform: null -> cpu",
        "trainer.max_actor_ckpt_to_keep: null -> 3",
    ]


def test_a_change_within_a_section_is_named_once() -> None:
    sglang = "actor_rollout_ref.rollout.engine_kwargs.sglang"
    earlier = json.loads(settings_json(run_config()))
    config = run_config(f"{sglang}.python=python")
    assert [str(change) for change in changed_settings(config, earlier)] == [
        f"{sglang}: {{}} -> {{python:python}}",
    ]


def test_two_paths_of_one_file_do_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    for name in ("a.parquet", "b.parquet"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)

    def config(folder: str, *, file: str = "a.parquet") -> RunConfig:
        return run_config(
            f"actor_rollout_ref.model.path={folder}model", f"data.val_files=[{folder}{file}]"
        )

    earlier = json.loads(settings_json(config("")))
    assert changed_settings(config(f"{tmp_path}/"), earlier) == ()
    other = changed_settings(config(f"{tmp_path}/", file="b.parquet"), earlier)
    assert [change.key for change in other] == ["data.val_files"]


def test_keys_of_a_single_start_do_not_count() -> None:
    earlier = json.loads(settings_json(run_config()))
    keys = (
        "default_local_dir=/elsewhere",
        "resume_mode=disable",
        "val_only=True",
        "max_restarts=2",
    )
    assert changed_settings(run_config(*(f"trainer.{key}" for key in keys)), earlier) == ()


def test_keys_that_another_version_did_not_have_do_not_count() -> None:
    earlier = json.loads(settings_json(run_config()))
    del earlier["algorithm"], earlier["trainer"]["project_name"]
    earlier["data"]["of_another_version"] = 1
    assert (
        changed_settings(run_config("algorithm.gamma=0.5", "trainer.project_name=p"), earlier) == ()
    )


def test_keys_that_make_another_experiment_exist() -> None:
    assert not ANOTHER_EXPERIMENT - keys_of(RunConfig).keys() - keys_of(SftConfig).keys()
