# SPDX-License-Identifier: Apache-2.0
"""verl's defaults: which configurations have them, and what replaces them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import BaseModel

from tandem.config.check.ignored_keys import ignored_keys
from tandem.config.parse.keys import find_key
from tandem.config.parse.overrides import load_config
from tandem.config.plan.plan import make_plan
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.config.schema.verl_defaults import VERL_DEFAULTS

SCHEMAS: dict[str, type[BaseModel]] = {
    name: SftConfig if name.startswith("sft") else RunConfig for name in VERL_DEFAULTS
}


@pytest.mark.parametrize("name", [name for name in VERL_DEFAULTS if name != "sft_trainer_megatron"])
def test_the_table_names_keys_and_values_of_the_schema(name: str) -> None:
    key = "rollout.total_rollout_steps"  # verl's default is less than its default of a batch
    given = [f"{key}=1024"] if key in VERL_DEFAULTS[name] else []
    loaded = load_config(SCHEMAS[name], [f"--config-name={name}", *given])
    defaults = VERL_DEFAULTS[name].items()
    assert dict(loaded.verl_defaults) == {name: value for name, value in defaults if name != key}
    for key in loaded.verl_defaults:
        assert find_key(SCHEMAS[name], key) is not None


def test_verls_ppo_trains_with_a_critic_on_eight_devices() -> None:
    config = load_config(RunConfig, ["--config-name=ppo_trainer"]).config
    assert config.uses_critic
    assert config.trainer.n_gpus_per_node == 8
    assert "n_gpus_per_node" not in config.trainer.model_fields_set


def test_what_the_user_sets_replaces_verls_default() -> None:
    arguments = ["--config-name=sft_trainer_engine", "optim.lr=1e-5", "data.use_dynamic_bsz=False"]
    loaded = load_config(SftConfig, arguments)
    assert loaded.config.optim.lr == 1e-5
    assert not loaded.config.data.use_dynamic_bsz
    assert loaded.config.optim.betas == (0.9, 0.999)
    assert not {"optim.lr", "data.use_dynamic_bsz"} & set(loaded.verl_defaults)


def test_a_reset_key_has_verls_default_again() -> None:
    arguments = ["--config-name=ppo_trainer", "algorithm.adv_estimator=rloo", "~algorithm"]
    loaded = load_config(RunConfig, arguments)
    assert loaded.config.algorithm.adv_estimator == "gae"


def test_a_file_that_lists_verls_configuration_has_its_defaults(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer]\ntrainer: {n_gpus_per_node: 4}\n")
    config = load_config(RunConfig, [str(tmp_path / "mine.yaml")]).config
    assert config.algorithm.adv_estimator == "gae"
    assert config.trainer.n_gpus_per_node == 4


def test_an_entry_module_keeps_its_defaults_below_a_file_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optim: {lr: 2e-5}\n")
    names = ["--config-name=sft_trainer_engine", f"--config-path={tmp_path}", "--config-name=mine"]
    config = load_config(SftConfig, names).config
    assert config.optim.lr == 2e-5
    assert config.optim.lr_scheduler_type == "constant"


def test_a_file_of_the_working_directory_is_no_configuration_of_verl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ppo_trainer.yaml").write_text("trainer: {nnodes: 3}\n")
    monkeypatch.chdir(tmp_path)
    named = load_config(RunConfig, ["--config-name=ppo_trainer"]).config
    assert named.trainer.nnodes == 1
    placed = load_config(RunConfig, ["--config-path=.", "--config-name=ppo_trainer"]).config
    assert placed.trainer.nnodes == 3


def test_the_plan_shows_verls_defaults_and_none_is_without_effect() -> None:
    loaded = load_config(SftConfig, ["--config-name=sft_trainer_engine", "optim.lr=1e-5"])
    shown = make_plan(loaded).to_dict()["verl_defaults"]
    assert shown["optim.lr_scheduler_type"] == "constant"
    assert "optim.lr" not in shown
    assert ignored_keys(loaded) == {}
