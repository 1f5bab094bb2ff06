# SPDX-License-Identifier: Apache-2.0
"""From arguments to a configuration: precedence, aliases, unknown keys, wrong values."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from tandem.config.derived.microbatches import limits
from tandem.config.parse.overrides import LoadedConfig, load_config
from tandem.config.schema.run import RunConfig
from tandem.config.schema.sft import SftConfig
from tandem.errors import UserError

TEMPLATE = "data.apply_chat_template_kwargs"


def load(*arguments: str) -> LoadedConfig[RunConfig]:
    return load_config(RunConfig, arguments)


def error_of(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        load(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults_are_verls_where_nothing_else_is_said() -> None:
    config = load().config
    assert config == RunConfig()
    assert config.data.train_batch_size == 1024
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 256
    assert config.actor_rollout_ref.rollout.name == "auto"


def test_later_wins_defaults_then_recipe_then_command_line(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {train_batch_size: 8, max_prompt_length: 9}\n"
        "actor_rollout_ref: {actor: {optim: {lr: 5e-7}}}\n"
        "trainer.nnodes: 1\n"
    )
    loaded = load("data.train_batch_size=4", str(recipe))
    assert loaded.config.data.train_batch_size == 4
    assert loaded.config.data.max_prompt_length == 9
    assert loaded.config.data.max_response_length == 512
    assert loaded.config.actor_rollout_ref.actor.optim.lr == 5e-7
    assert "trainer.nnodes" in loaded.set_keys


def test_plus_on_a_known_key_sets_it_and_tilde_takes_it_back() -> None:
    assert load("+trainer.test_freq=3").config.trainer.test_freq == 3
    assert load("++trainer.test_freq=3").config.trainer.test_freq == 3
    loaded = load("trainer.test_freq=3", "~trainer.test_freq", "trainer.save_freq=2", "~trainer")
    assert loaded.config == RunConfig()
    assert loaded.set_keys == {}


def test_one_string_stands_for_a_list() -> None:
    config = load("trainer.logger=console", "data.train_files=a", "data.val_files=null").config
    assert config.trainer.logger == ("console",)
    assert config.data.train_files == ("a",)
    assert config.data.val_files == ()
    assert load("trainer.logger=[]").config.trainer.logger == ()


def test_numbers_become_text_where_text_is_wanted() -> None:
    assert load("trainer.experiment_name=2024").config.trainer.experiment_name == "2024"
    assert load("data.train_batch_size='64'").config.data.train_batch_size == 64


def test_free_form_sections_take_any_key() -> None:
    loaded = load(
        "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True",
        "actor_rollout_ref.rollout.engine_kwargs.vllm.swap_space=4",
        "critic.optim.lr=1e-5",
    )
    assert loaded.config == RunConfig.model_validate({"critic": {"optim": {"lr": 1e-5}}})
    assert len(loaded.set_keys) == 3
    assert loaded.unknown_keys == ()
    read = load("+data.apply_chat_template_kwargs.a.b=4").config
    assert read.data.apply_chat_template_kwargs == {"a": {"b": 4}}


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        ([f"+{TEMPLATE}.a=1", f"{TEMPLATE}={{}}"], {}),
        ([f"+{TEMPLATE}.a=1", f"{TEMPLATE}={{b:2}}", f"+{TEMPLATE}.c=3"], {"b": 2, "c": 3}),
        ([f"+{TEMPLATE}.a.b=1", f"+{TEMPLATE}.a=5"], {"a": 5}),
        ([f"+{TEMPLATE}.a=5", f"+{TEMPLATE}.a.b=1"], {"a": {"b": 1}}),
        ([f"+{TEMPLATE}.a=5", f"~{TEMPLATE}.a.b"], {"a": 5}),
    ],
)
def test_a_later_value_replaces_what_is_below_it(arguments: list[str], left: object) -> None:
    loaded = load_config(RunConfig, arguments)
    assert loaded.config.data.apply_chat_template_kwargs == left


def test_a_mapping_sets_the_keys_of_a_section() -> None:
    config = load("algorithm.kl_ctrl={type:adaptive,horizon:5}").config
    assert (config.algorithm.kl_ctrl.type, config.algorithm.kl_ctrl.horizon) == ("adaptive", 5)
    assert config.algorithm.kl_ctrl.kl_coef == 0.001


def test_values_of_a_program_may_be_numpys_and_names_are_text() -> None:
    values = {"data.train_batch_size": np.int64(4), "algorithm.gamma": np.float32(0.5)}
    config = load_config(RunConfig, (), values=values).config
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 4 and config.algorithm.gamma == 0.5
    with pytest.raises(UserError, match="keys=3: is not a name"):
        load_config(RunConfig, (), values={3: 2})  # pyright: ignore[reportArgumentType]


def test_other_spellings_mean_one_key_with_one_notice() -> None:
    loaded = load(
        "reward.custom_reward_function.path=r.py",
        "reward_model.overlong_buffer.len=4",
        "actor_rollout_ref.actor.grad_clip=0.5",
        "+trainer.sperated_node_ratios=[1.0]",
        "+actor_rollout_ref.async_pipeline=True",
    )
    config = loaded.config
    assert config.custom_reward_function.path == ("r.py",)
    assert config.reward_model.reward_kwargs.overlong_buffer_cfg.len == 4
    assert config.actor_rollout_ref.actor.optim.clip_grad == 0.5
    assert config.trainer.separated_node_ratios == (1.0,)
    assert config.trainer.async_pipeline
    assert len(loaded.warnings) == 5
    assert "actor_rollout_ref.async_pipeline is read as trainer.async_pipeline" in loaded.warnings


SPELLINGS = (
    ("trainer.separated_node_ratios", "+trainer.sperated_node_ratios", "[0.5,0.5]", "[0.25,0.75]"),
    ("trainer.separated_node_tasks", "trainer.sperated_node_tasks", "[[logp],generate]", "[logp]"),
    ("trainer.async_pipeline", "actor_rollout_ref.async_pipeline", "True", "False"),
    ("reward_model.reward_manager", "reward.reward_manager.name", "dapo", "naive"),
    ("critic.model.fsdp_config.fsdp_size", "critic.fsdp.fsdp_size", "1", "2"),
    ("ray_kwargs.ray_init.num_cpus", "ray_init.num_cpus", "1", "2"),
)


@pytest.mark.parametrize(("key", "alias", "value", "other"), SPELLINGS)
def test_two_spellings_of_a_key_may_not_differ(
    key: str, alias: str, value: str, other: str
) -> None:
    both = [f"{key}={value}", f"{alias}={other}"]
    for arguments in (both, both[::-1]):
        said = error_of(*arguments)
        names = [argument.partition("=")[0].lstrip("+") for argument in arguments]
        assert said.startswith(f"{names[0]}=") and f"must not differ from {names[1]}=" in said
        assert said.endswith(f", as both mean {key}. Leave one of them out.")
    same = [f"{key}={value}", f"{alias}={value}"]
    assert load(*same).config == load(*same[::-1]).config == load(same[0]).config


def test_two_other_spellings_may_not_differ_either() -> None:
    with pytest.raises(UserError, match=r"both mean engine\.param_offload"):
        load_config(SftConfig, ["engine.cpu_offload=True", "engine.offload_params=False"])


def test_one_spelling_twice_and_one_taken_back_are_no_contradiction() -> None:
    key, alias = "trainer.async_pipeline", "actor_rollout_ref.async_pipeline"
    assert not load(f"{alias}=True", f"{alias}=False", f"{key}=False").config.trainer.async_pipeline
    assert load(f"{alias}=False", f"~{alias}", f"{key}=True").config.trainer.async_pipeline


def test_what_a_file_takes_from_another_key_contradicts_nothing(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "actor_rollout_ref.ref.ulysses_sequence_parallel_size: ${trainer.nnodes}\n"
        "actor_rollout_ref.ref.fsdp_config.ulysses_sequence_parallel_size: 2\n"
    )
    layout = load(str(recipe)).config.actor_rollout_ref.ref.fsdp_config
    assert layout.ulysses_sequence_parallel_size == 2


def test_another_spelling_overrules_a_file_but_no_file_contradicts_itself(tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("actor_rollout_ref: {async_pipeline: False}\n")
    assert load(str(recipe), "trainer.async_pipeline=True").config.trainer.async_pipeline
    recipe.write_text(f"{recipe.read_text()}trainer: {{async_pipeline: True}}\n")
    said = error_of(str(recipe))
    assert f"=True in {recipe}, as both mean trainer.async_pipeline" in said
    assert not load(str(recipe), "trainer.async_pipeline=False").config.trainer.async_pipeline


def test_old_and_new_keys_of_sft_mean_the_same() -> None:
    old = load_config(
        SftConfig,
        [
            "model.partial_pretrain=m",
            "model.fsdp_config.cpu_offload=True",
            "optim.lr_scheduler=cosine",
        ],
    )
    new = load_config(
        SftConfig, ["model.path=m", "engine.param_offload=True", "optim.lr_scheduler_type=cosine"]
    )
    assert old.config == new.config
    assert old.config.optim.betas == (0.9, 0.95)


def test_rollout_and_reference_follow_the_actors_token_limits() -> None:
    config = load(
        "actor_rollout_ref.actor.use_dynamic_bsz=True",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=8192",
    ).config
    roles = config.actor_rollout_ref
    assert roles.rollout.log_prob_use_dynamic_bsz and roles.ref.log_prob_use_dynamic_bsz
    assert limits(config, "logp").max_tokens == 4096
    assert limits(config, "ref_logp").max_tokens == 8192


def test_other_seeds_follow_the_runs_unless_they_are_set() -> None:
    def seeds(*arguments: str) -> tuple[int, int, int]:
        config = load(*arguments).config
        roles = config.actor_rollout_ref
        return config.data.seed, roles.rollout.seed, roles.actor.data_loader_seed

    assert seeds() == (1, 1, 42)
    assert seeds("trainer.seed=7") == (7, 7, 7)
    rollout = "actor_rollout_ref.rollout.seed=3"
    assert seeds(rollout, "trainer.seed=7", "actor_rollout_ref.actor.shuffle=True") == (7, 3, 7)
    assert seeds("trainer.seed=null", "data.seed=4") == (4, 1, 1)
    assert load_config(SftConfig, ["trainer.seed=7"]).config.data.seed == 7
    whole = RunConfig.model_validate({"data": RunConfig().data, "trainer": {"seed": 7}})
    assert whole.data == RunConfig().data, "a section that is complete stays as it is"


def test_clip_ratio_is_effective_until_both_sides_replace_it() -> None:
    actor = load(
        "actor_rollout_ref.actor.clip_ratio=0.1", "actor_rollout_ref.actor.clip_ratio_high=0.3"
    ).config.actor_rollout_ref.actor
    assert (actor.clip_low, actor.clip_high) == (0.1, 0.3)


def test_interpolations_are_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_NAME", "seven")
    config = load(
        "trainer.experiment_name=${trainer.project_name}_${oc.env:TANDEM_TEST_NAME}",
        "trainer.default_local_dir=runs/${env:TANDEM_TEST_MISSING,0}",
        "data.max_response_length=${data.max_prompt_length}",
        "trainer.logger=[console,'${env:TANDEM_TEST_MISSING,file}']",
    ).config
    assert config.trainer.experiment_name == "verl_examples_seven"
    assert config.trainer.default_local_dir == "runs/0"
    assert config.data.max_response_length == 512
    assert config.trainer.logger == ("console", "file")
    assert len(load("trainer.experiment_name=${now:%Y}").config.trainer.experiment_name) == 4


def test_hydras_own_keys_are_accepted_and_ignored() -> None:
    loaded = load("++hydra.run.dir=outputs/${now:%Y}/${env:RANK,0}", "hydra.job.chdir=${nothing}")
    assert loaded.config == RunConfig()
    assert loaded.unknown_keys == loaded.warnings == ()


def test_an_unknown_plus_key_is_a_warning_that_names_the_nearest() -> None:
    loaded = load("+trainer.test_frequency=5")
    assert loaded.unknown_keys == ("trainer.test_frequency",)
    assert loaded.warnings == (
        "trainer.test_frequency: unknown, has no effect; nearest key: trainer.test_freq",
    )


def test_a_configuration_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load().config.data.train_batch_size = 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.train_batchsize=8"], "=8: no such key. Did you mean data.train_batch_size?"),
        (["trainer.train_batch_size=8"], "Did you mean data.train_batch_size?"),
        (["~trainer.nothing"], "no such key"),
        (["trainer.nnodes.x=1"], "no such key"),
        (["trainer.nnodes="], "trainer.nnodes='': value is empty. Is $WORLD_SIZE set? Set"),
        (["actor_rollout_ref.model.path="], "value is empty. Is the shell variable behind it set?"),
        (["trainer.nnodes=two"], "='two': must be an integer. Set trainer.nnodes=1 (the default)."),
        (["trainer.nnodes=1.5"], "trainer.nnodes=1.5: must be an integer."),
        (["trainer.nnodes=0"], "trainer.nnodes=0: must be at least 1."),
        (["trainer.nnodes=null"], "trainer.nnodes=None: must be an integer."),
        (
            ["trainer.save_freq=True"],
            "trainer.save_freq=True: must be a number. Set trainer.save_f",
        ),
        (["actor_rollout_ref.actor.optim.lr=False"], "optim.lr=False: must be a number."),
        (["actor_rollout_ref.actor.optim.lr=fast"], "optim.lr='fast': must be a number."),
        (["actor_rollout_ref.actor.optim.lr=inf"], "must be a finite number"),
        (["actor_rollout_ref.actor.optim.betas=[0.9]"], "actor_rollout_ref.actor.optim.betas"),
        (["actor_rollout_ref.actor.clip_ratio_c=1"], "must be greater than 1"),
        (["actor_rollout_ref.rollout.top_p=1.5"], "must be at most 1"),
        (["trainer.val_only=perhaps"], "trainer.val_only='perhaps': must be True or False."),
        (["trainer.logger=5"], "must be a list like [a,b]. Set trainer.logger=[console] (the def"),
        (["trainer.logger=[5,[x]]"], "trainer.logger.1=[x]: must be text."),
        (["data.apply_chat_template_kwargs=yes"], "must be a mapping like {key:value}"),
        (["algorithm.adv_estimator=grbo"], "='grbo': must be one of gae, grpo,"),
        (["trainer.resume_mode=no"], "auto, disable, resume_path. Set trainer.resume_mode=auto"),
        (["trainer=5"], "trainer=5: is a section, not a key. Set one of its keys, e.g. trainer."),
        (["trainer.experiment_name=${trainer.nothing}"], "cannot be resolved"),
        (["trainer.experiment_name='${'"], "trainer.experiment_name: cannot be resolved (no viabl"),
        ([f"+{TEMPLATE}.a=['${{x']"], f"{TEMPLATE}.a[0]: cannot be resolved"),
        ([f"+{TEMPLATE}.a=1", f"{TEMPLATE}=5"], f"{TEMPLATE}=5: must be a mapping"),
        ([f"+{TEMPLATE}.a=1", f"{TEMPLATE}=null"], f"{TEMPLATE}=None: must be a mapping"),
        ([f"{TEMPLATE}=5", f"~{TEMPLATE}.a"], f"{TEMPLATE}=5: must be a mapping"),
        (["nowhere.yaml"], "'nowhere.yaml': no such recipe file."),
    ],
)
def test_a_mistake_is_one_line_with_key_value_rule_and_remedy(
    arguments: list[str], message: str
) -> None:
    assert message in error_of(*arguments)
