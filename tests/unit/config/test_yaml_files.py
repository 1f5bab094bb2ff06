# SPDX-License-Identifier: Apache-2.0
"""YAML files: recipes, and the configurations that verl's users bring with --config-path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.config.parse.overrides import load_config
from tandem.config.parse.yaml_content import read_yaml
from tandem.config.schema.run import RunConfig
from tandem.errors import UserError


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_named_config_with_defaults_lies_under_the_command_line(tmp_path: Path) -> None:
    write(
        tmp_path / "mine.yaml",
        "hydra: {searchpath: ['file://x']}\n"
        "defaults: [ppo_trainer, shared, optim@actor_rollout_ref.actor.optim: fast, _self_]\n"
        "data: {train_batch_size: 8, max_prompt_length: 8}\n"
        "trainer: {_target_: x.Y, project_name: '???', experiment_name: '${data.seed}_run'}\n",
    )
    write(tmp_path / "shared.yaml", "data: {train_batch_size: 2, seed: 7}\n")
    write(tmp_path / "optim/fast.yaml", "lr: 5e-4\n")
    loaded = load_config(
        RunConfig,
        [f"--config-path={tmp_path}", "--config-name=mine", "data.max_prompt_length=16"],
    )
    config = loaded.config
    assert (config.data.train_batch_size, config.data.max_prompt_length) == (8, 16)
    assert config.data.seed == 7
    assert config.actor_rollout_ref.actor.optim.lr == 5e-4
    assert config.trainer.experiment_name == "7_run"
    assert config.trainer.project_name == "verl_examples"
    assert loaded.warnings == ()


def test_self_before_the_defaults_lets_them_win(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "defaults: [_self_, other]\ndata: {seed: 1}\n")
    write(tmp_path / "other.yaml", "data: {seed: 2}\n")
    arguments = ["--config-path", str(tmp_path), "--config-name", "mine.yaml"]
    assert load_config(RunConfig, arguments).config.data.seed == 2


def test_a_missing_default_is_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "defaults: [model: absent]\n")
    arguments = [f"--config-path={tmp_path}", "--config-name=mine"]
    assert "absent.yaml does not exist" in load_config(RunConfig, arguments).warnings[0]


def test_unknown_keys_of_a_config_written_for_verl_are_warnings(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "trainer: {shiny: 1}\n")
    loaded = load_config(RunConfig, [f"--config-path={tmp_path}", "--config-name=mine"])
    assert loaded.unknown_keys == ("trainer.shiny",)
    assert "mine.yaml" in loaded.warnings[0]


def test_unknown_keys_of_a_recipe_are_errors_that_name_the_file(tmp_path: Path) -> None:
    recipe = write(tmp_path / "recipe.yaml", "data: {train_batchsize: 1}\n")
    with pytest.raises(UserError, match=r"no such key in .*recipe\.yaml\. Did you mean data"):
        load_config(RunConfig, [str(recipe)])


@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_verls_own_configurations_are_built_in(name: str) -> None:
    loaded = load_config(RunConfig, [f"--config-name={name}"])
    is_megatron = loaded.config.actor_rollout_ref.actor.strategy == "megatron"
    assert is_megatron == ("megatron" in name)
    assert not any("does not exist" in warning for warning in loaded.warnings)


def test_a_strategy_implied_by_a_name_gives_way_to_a_chosen_one() -> None:
    arguments = ["--config-name=x_megatron", "actor_rollout_ref.actor.strategy=fsdp2"]
    assert load_config(RunConfig, arguments).config.actor_rollout_ref.actor.strategy == "fsdp2"


@pytest.mark.parametrize("text", ["a: [1\n", "- 1\n", "just text\n"])
def test_a_file_that_is_no_mapping_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    recipe = write(tmp_path / "recipe.yaml", text)
    with pytest.raises(UserError) as caught:
        load_config(RunConfig, [str(recipe)])
    assert "recipe.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"1: 2\n", b"true: 2\n"])
def test_a_file_of_other_bytes_or_keys_is_refused_in_one_line(
    tmp_path: Path, content: bytes
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_config(RunConfig, [str(recipe)])
    assert "recipe.yaml" in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("tag", ["python/object/apply:os.mkdir", "python/name:os.mkdir"])
def test_a_recipe_runs_no_code(tmp_path: Path, tag: str) -> None:
    mark = tmp_path / "was here"
    recipe = write(tmp_path / "recipe.yaml", f"data: !!{tag} [{mark}]\n")
    with pytest.raises(UserError) as caught:
        load_config(RunConfig, [str(recipe)])
    assert "recipe.yaml" in str(caught.value) and "\n" not in str(caught.value)
    assert not mark.exists()


def test_defaults_that_lead_back_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "mine.yaml", "defaults: [other]\n")
    write(tmp_path / "other.yaml", "defaults: [mine]\n")
    with pytest.raises(UserError, match="include the file itself"):
        load_config(RunConfig, [str(tmp_path / "mine.yaml")])


@pytest.mark.parametrize("defaults", ["text", "[{a: b, c: d}]", "[[a]]", "[{a: [b]}]"])
def test_defaults_of_another_form_are_refused(tmp_path: Path, defaults: str) -> None:
    recipe = write(tmp_path / "mine.yaml", f"defaults: {defaults}\n")
    with pytest.raises(UserError, match="defaults: must be"):
        load_config(RunConfig, [str(recipe)])


def test_hydras_own_groups_in_defaults_are_skipped(tmp_path: Path) -> None:
    recipe = write(tmp_path / "mine.yaml", "defaults: [override hydra/job_logging: none]\n")
    assert load_config(RunConfig, [str(recipe)]).warnings == ()


@pytest.mark.parametrize("text", ["a: &a [*a]", "data: &a {b: *a}", "a: " + "[" * 2000])
def test_a_recipe_that_contains_itself_is_refused_in_a_short_line(
    tmp_path: Path, text: str
) -> None:
    recipe = write(tmp_path / "mine.yaml", text)
    with pytest.raises(UserError, match="is not valid YAML .a value contains itself, or") as caught:
        load_config(RunConfig, [str(recipe)])
    assert len(str(caught.value)) < 200 + len(str(recipe))


def test_a_mapping_with_numbers_and_dots_as_keys_may_refer_to_other_keys(tmp_path: Path) -> None:
    recipe = write(
        tmp_path / "mine.yaml",
        "data: {seed: 7, apply_chat_template_kwargs: {a: {1: '${data.seed}', x.y: 2}}}",
    )
    config = load_config(RunConfig, [str(recipe)]).config
    assert config.data.apply_chat_template_kwargs == {"a": {1: 7, "x.y": 2}}


@pytest.mark.parametrize("name", ["x" * 300 + ".yaml", "~nobody-has-this-name/x.yaml"])
def test_a_name_that_no_recipe_can_have_is_one_line(name: str) -> None:
    with pytest.raises(UserError, match="no such recipe file"):
        load_config(RunConfig, [name])


def test_a_file_that_cannot_be_opened_is_not_called_invalid(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^k='.*': cannot be read \(File name too long\)\. "):
        read_yaml("x" * 300, key="k", resolved=True)
    with pytest.raises(UserError, match=r"^k='.*': cannot be read \(Is a directory\)\. "):
        read_yaml(str(tmp_path), key="k", resolved=True)
